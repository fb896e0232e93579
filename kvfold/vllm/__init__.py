"""vLLM's KV connector over kvfold's store: `kv_connector="FoldConnector", kv_connector_module_path="kvfold.vllm"`.

It needs vLLM, which nothing else of kvfold imports, and which `import vllm` inside this package still finds. The class
is imported when it is asked for: vLLM loads the plug-in of this package before all of itself is there.
"""

from __future__ import annotations

from typing import Any

from kvfold.errors import MissingExtra

__all__ = ["FoldConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        from kvfold.vllm.connector import FoldConnector
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        text = 'kvfold.vllm is a connector of vLLM, which is not installed; install it with: pip install "kvfold[vllm]"'
        raise MissingExtra(text) from error
    return FoldConnector
