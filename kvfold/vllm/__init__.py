"""vLLM's KV connector over kvfold's store: `kv_connector="FoldConnector", kv_connector_module_path="kvfold.vllm"`.

It needs vLLM, which nothing else of kvfold imports, and which `import vllm` inside this package still finds.
"""

from kvfold.errors import MissingExtra

try:
    from kvfold.vllm.connector import FoldConnector
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "vllm":
        raise
    text = 'kvfold.vllm is a connector of vLLM, which is not installed; install it with: pip install "kvfold[vllm]"'
    raise MissingExtra(text) from error

__all__ = ["FoldConnector"]
