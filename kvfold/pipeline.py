"""A task for `pipeline` of transformers: one context, many questions, a KV-cache policy.

    kvfold.register_pipeline()
    pipe = transformers.pipeline("kvfold-text-generation", model="Qwen/Qwen3-8B", policy="kvzip + global + 4x")
    pipe(document, questions=["Who wrote this?", "When?"])["answers"]

Arguments have the names of kvpress' pipeline, with a policy in place of a press; the work is `kvfold.answer`.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from kvfold.answering import Answers, answer
from kvfold.errors import InputError
from kvfold.reply import GenerateOptions

TASK = "kvfold-text-generation"
_OWN = ("policy", "answer_prefix", "max_new_tokens", "max_context_length", "template")


class KvfoldPipeline(Pipeline):  # type: ignore[misc]
    """`pipe(context, question=…)` returns {"answer": …}, `pipe(context, questions=[…])` returns {"answers": […]}; both
    add "stats", the size of the compressed context. Without a policy the cache is `full`: nothing is compressed."""

    _load_tokenizer = True
    _load_processor = _load_image_processor = _load_feature_extractor = False

    def _sanitize_parameters(
        self, question: str | None = None, questions: list[str] | None = None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        known = (*_OWN, *GenerateOptions.__annotations__)
        for name in options:
            if name == "press":
                raise TypeError('give policy="kvzip + global + 4x", or another policy, in place of press')
            if name not in known:
                raise TypeError(f"there is no option {name!r}; options: question, questions, {', '.join(known)}")
        if question is not None and questions is not None:
            raise InputError("give either question or questions")
        if question is not None:
            return {}, options | {"questions": question}, {"single": True}
        return {}, options if questions is None else options | {"questions": questions}, {}

    def preprocess(self, input_: Any, **_: Any) -> dict[str, Any]:
        if not isinstance(input_, str):
            raise InputError(f"the context is a text, not {type(input_).__name__}; messages go into kvfold.Session")
        return {"context": input_}

    def _forward(self, input_tensors: dict[str, Any], **options: Any) -> dict[str, Any]:
        if "questions" not in options:
            raise InputError("give a question=…, or questions=[…]")
        return {"found": answer(self.model, input_tensors["context"], tokenizer=self.tokenizer, **options)}

    def postprocess(self, model_outputs: dict[str, Any], single: bool = False, **_: Any) -> dict[str, Any]:
        found: Answers = model_outputs["found"]
        answers = {"answer": found.texts[0]} if single else {"answers": found.texts}
        return {**answers, "stats": found.stats}


def register_pipeline() -> None:
    """Make transformers know the task `kvfold-text-generation`. Calling it again changes nothing."""
    if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
        PIPELINE_REGISTRY.register_pipeline(TASK, pipeline_class=KvfoldPipeline, pt_model=AutoModelForCausalLM)
