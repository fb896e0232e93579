"""How replies are scored: substrings and numbers (RULER, InfiniteBench), and the metrics of SQuAD and LongBench.

Normalisation and token F1 are SQuAD's (arXiv:1606.05250); the others follow LongBench's scorers (arXiv:2308.14508),
oddities included, since published numbers contain them:

    rouge_l         over sets of words, sentence by sentence, sentences ending at every full stop (the `rouge` package)
    classification  drops a matched class that is part of the right one while walking the list, so the next is skipped
    code_similarity reads the first line without a backtick, # or //, so a right line with a comment is not seen

One thing differs: `rouge_l` leaves out the 1e-8 in the denominator of F, so that a perfect summary scores 1, not
0.999999995. All scores are from 0 to 1.
"""

from __future__ import annotations

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from kvfold.errors import MissingExtra

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MARKS_ZH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_PUNCTUATION_ZH = str.maketrans("", "", string.punctuation + _MARKS_ZH)
_COMMENT_MARKS = ("`", "#", "//")
_CHOICES = tuple(re.compile(f"The correct answer is {letter}") for letter in (r"\(([A-D])\)", "([A-D])"))


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(reply: str, answer: str) -> float:
    """F1 over the words of both after normalisation, each counted as often as it occurs."""
    return bag_f1(normalise(reply).split(), normalise(answer).split())


def token_f1_zh(reply: str, answer: str) -> float:
    """F1 over Chinese words, as jieba cuts them."""
    return bag_f1(_words_zh(reply), _words_zh(answer))


def bag_f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of the share of found items that are wanted and of wanted ones that are found."""
    num_same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * num_same / (len(found) + len(wanted)) if num_same else 0.0


def rouge_l(reply: str, reference: str) -> float:
    """F over distinct words: those in a longest common subsequence of any two sentences, among those of each text."""
    found, wanted = _sentences(reply), _sentences(reference)
    common = {word for target in wanted for sentence in found for word in common_subsequence(target, sentence)}
    num_words = len({word for sentence in found for word in sentence}) + len({w for s in wanted for w in s})
    return 2 * len(common) / num_words if common else 0.0


def rouge_l_zh(reply: str, reference: str) -> float:
    """The same over Chinese words, as jieba cuts them."""
    return rouge_l(" ".join(_cut(reply)), " ".join(_cut(reference)))


def classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes the reply names, if the right one is among them."""
    named = [name for name in classes if name in reply]
    for name in named:  # removing while walking skips the next name: the reference does so
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def number_share(reply: str, answer: str) -> float:
    """The share of numbers in the reply that are the first number of the answer ("12", "Paragraph 12", "段落12")."""
    numbers = re.findall(r"\d+", reply)
    wanted = re.findall(r"\d+", answer)[:1]
    return sum([number] == wanted for number in numbers) / len(numbers) if numbers else 0.0


def code_similarity(reply: str, answer: str) -> float:
    """Twice the matching characters over all, of the first line that is code, rounded to hundredths."""
    lines = reply.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _COMMENT_MARKS)), "")
    if not line or not answer:
        return 0.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def choice(reply: str, answer: str) -> float:
    """LongBench v2: the letter after "The correct answer is", in brackets or else bare, stars ignored."""
    plain = reply.replace("*", "")
    letters = [found[1] for found in (pattern.search(plain) for pattern in _CHOICES) if found]
    return float(letters[:1] == [answer])


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several, the one that keeps to the end of `first`."""
    length = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first, 1):
        for j, other in enumerate(second, 1):
            length[i][j] = length[i - 1][j - 1] + 1 if one == other else max(length[i - 1][j], length[i][j - 1])
    found, i, j = list[str](), len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.append(first[i])
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _sentences(text: str) -> list[list[str]]:
    """Words of the parts between full stops; a part of mere space counts as one empty word, as in the reference."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_PUNCTUATION_ZH).split()) for word in _cut(text))
    return [word for word in words if word]


def _cut(text: str) -> list[str]:
    try:
        jieba: Any = importlib.import_module("jieba")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            'scores of Chinese text need jieba, which is not installed; pip install "kvfold[longbench]"'
        ) from error
    words: list[str] = jieba.lcut(text)
    return words


_CONTROL = re.compile(r"[\x00-\x1f]")
_DIGITS = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"[0-9]+\.[0-9]+|[0-9]+")
_MARKS = re.compile(r"""[\n:"'.,?!{}]""")


def match_all(answers: Sequence[str], reply: str) -> float:
    """RULER's string_match_all: the share of answers that occur in the reply, in whatever case."""
    return sum(_occurs(answer, reply) for answer in answers) / len(answers)


def match_part(answers: Sequence[str], reply: str) -> float:
    """RULER's string_match_part: whether any of the answers occurs in the reply, in whatever case."""
    return float(any(_occurs(answer, reply) for answer in answers))


def first_digits(reply: str) -> str:
    """InfiniteBench's first integer, as written: leading zeros count."""
    found = _DIGITS.search(reply)
    return found[0] if found else ""


def last_digits(reply: str) -> str:
    found: list[str] = _DIGITS.findall(reply)
    return found[-1] if found else ""


def first_number(reply: str) -> float | None:
    """InfiniteBench's first integer or decimal."""
    found = _NUMBER.search(reply)
    return float(found[0]) if found else None


def split_words(reply: str) -> list[str]:
    """InfiniteBench's words: parted by blanks and by the marks that answers are wrapped in."""
    return _MARKS.sub(" ", reply).split()


def _occurs(answer: str, reply: str) -> bool:
    return answer.lower() in _CONTROL.sub("\n", reply).lower()
