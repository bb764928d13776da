"use strict";
// The filters. Their state stands in the fragment of the address, so that a link or a bookmark keeps it.

const form = document.getElementById("filters");
const fields = [...form.elements].filter(field => field.name);
const decisions = [...document.querySelectorAll("article")].map(article => ({
  article,
  backend: article.dataset.backend,
  fused: article.dataset.fused,
  speedup: Number(article.dataset.speedup),
  reasons: [...article.querySelectorAll(".reason")].map(reason => reason.textContent),
  text: [...article.querySelectorAll("[data-search]")].map(part => part.textContent).join(" ").toLowerCase(),
}));

const passes = {
  text: (decision, wanted) => wanted.toLowerCase().split(/\s+/).every(word => decision.text.includes(word)),
  reason: (decision, wanted) => decision.reasons.includes(wanted),
  backend: (decision, wanted) => decision.backend === wanted,
  fused: (decision, wanted) => decision.fused === wanted,
  speedup: (decision, wanted) => decision.speedup >= Number(wanted),
};

function filter() {
  const active = fields.filter(field => field.value !== "");
  let count = 0;
  for (const decision of decisions) {
    const shown = active.every(field => passes[field.name](decision, field.value));
    decision.article.hidden = !shown;
    count += shown;
  }
  form.querySelector("output").value = `${count} of ${decisions.length} decisions shown`;
}

function toFragment() {
  const active = fields.filter(field => field.value !== "").map(field => [field.name, field.value]);
  history.replaceState(null, "", "#" + new URLSearchParams(active));
}

function fromFragment() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) {
    field.value = wanted.get(field.name) ?? "";
    if (field.selectedIndex === -1) field.value = ""; // a value that this log does not have
  }
  filter();
}

form.addEventListener("input", () => { toFragment(); filter(); });
form.addEventListener("reset", () => setTimeout(() => { toFragment(); filter(); }));
form.addEventListener("submit", event => event.preventDefault());
window.addEventListener("hashchange", () => { fromFragment(); form.scrollIntoView(); });

const expand = document.getElementById("expand");
let expanded = false;
expand.addEventListener("click", () => {
  expanded = !expanded;
  expand.textContent = expanded ? "Collapse all" : "Expand all";
  for (const details of document.querySelectorAll("details")) details.open = expanded;
});

form.hidden = false;
fromFragment();
