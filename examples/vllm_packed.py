"""Ask a packed document in vLLM: python examples/vllm_packed.py handbook.json --store /var/kvfold --ask "Who paid?"

`handbook.json` comes from `kvfold pack handbook.txt --store /var/kvfold --dtype float32 --out handbook.json`.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvfold.models.pull.pull import resolve
from kvfold.packed import PackedPrefix


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a packed document in vLLM.")
    parser.add_argument("record", help="what kvfold pack --out wrote")
    parser.add_argument("--store", required=True, help="the folder that kvfold pack wrote to")
    parser.add_argument("--ask", action="append", required=True, help="a question; may be repeated")
    parser.add_argument("--eager", action="store_true", help="start without compiling, which takes minutes on a CPU")
    parser.add_argument("--memory-share", type=float, default=0.5, help="of the machine that vLLM takes (default: 0.5)")
    args = parser.parse_args()

    packed = PackedPrefix.load(args.record)
    connector = KVTransferConfig(
        kv_connector="FoldConnector",
        kv_connector_module_path="kvfold.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": args.store},
    )
    llm = LLM(
        str(resolve(packed.model)),
        dtype=packed.dtype,
        enforce_eager=args.eager,
        gpu_memory_utilization=args.memory_share,
        kv_transfer_config=connector,
    )
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt_token_ids": packed.prompt_token_ids(tokenizer, question)} for question in args.ask]
    named = {"kv_transfer_params": packed.kv_transfer_params}
    params = SamplingParams(temperature=0, max_tokens=32, extra_args=named)
    for question, output in zip(args.ask, llm.generate(prompts, params), strict=True):
        packed.check(output.kv_transfer_params)  # an error, if the document was not there
        print(f"{question}\n  {output.outputs[0].text.strip()}")
    print(f"{packed.num_slots} slots held for {packed.num_tokens} tokens")


if __name__ == "__main__":
    main()
