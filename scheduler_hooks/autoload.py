"""Called at the end of `import torch` (entry point group `torch.backends`): must be cheap and must not raise.

Inductor is not imported here (its configuration alone costs more than half of `import torch`). Instead a hook
stays behind that runs `install.connect` right after each of the three Inductor modules that we extend has been
imported by somebody else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

CONFIG = "torch._inductor.config"
SELECT_ALGORITHM = "torch._inductor.select_algorithm"
CUDA_SCHEDULING = "torch._inductor.codegen.cuda_combined_scheduling"
EXTENDED_MODULES = (CONFIG, SELECT_ALGORITHM, CUDA_SCHEDULING)


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of `EXTENDED_MODULES` as Python would, and has them connected once they have run."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """The spec of an extended module with a loader that connects it afterwards; None for any other."""
        if name not in EXTENDED_MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_connect(module: ModuleType) -> None:
            run(module)
            from . import install

            install.connect(name)

        spec.loader.exec_module = run_and_connect
        return spec


def autoload() -> None:
    """Installs the import hook, and connects what is imported already. Doing it twice changes nothing."""
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())
    if any(name in sys.modules for name in EXTENDED_MODULES):
        from . import install

        for name in EXTENDED_MODULES:
            if name in sys.modules:
                install.connect(name)
