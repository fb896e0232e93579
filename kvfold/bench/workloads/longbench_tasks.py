"""The tasks of LongBench: prompts, lengths of replies and metrics as published (arXiv:2308.14508, arXiv:2412.15204).

Prompts are those of the benchmark, word for word, oddities of spacing included: a score depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfold.bench.workloads import metrics

_CONCISE = "concisely as you can, using a single phrase{sentence} if possible."
_BARE = "Do not provide any explanation."
_PHRASE = "as" + _CONCISE.format(sentence="")  # sic
_SENTENCE = (
    "as "
    + _CONCISE.format(sentence=" or sentence")
    + " If the question cannot be answered based on the information in the "
    'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable".'
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_MULTI_HOP = (
    f"{_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:"
)


@dataclass(frozen=True)
class Task:
    prompt: str  # with {context} and, mostly, {input}
    max_new_tokens: int
    metric: Callable[[str, str], float] | None  # None: classification, which needs the row's classes
    chat: bool = True  # whether the benchmark puts the prompt into a chat template
    first_line: bool = False  # whether only the first line of a reply counts


TASKS = {
    "narrativeqa": Task(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"{_PHRASE} {_BARE}\n\nStory: {{context}}\n\nNow, answer the question based on the story {_PHRASE} {_BARE}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        metrics.token_f1,
    ),
    "qasper": Task(
        f"You are given a scientific article and a question. Answer the question {_SENTENCE} {_BARE}\n\n"
        f"Article: {{context}}\n\n Answer the question based on the above article {_SENTENCE} {_BARE}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        metrics.token_f1,
    ),
    "multifieldqa_en": Task(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        metrics.token_f1,
    ),
    "multifieldqa_zh": Task(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。"
        "\n\n问题：{input}\n回答：",
        64,
        metrics.token_f1_zh,
    ),
    "hotpotqa": Task(_MULTI_HOP, 32, metrics.token_f1),
    "2wikimqa": Task(_MULTI_HOP, 32, metrics.token_f1),
    "musique": Task(_MULTI_HOP, 32, metrics.token_f1),
    "dureader": Task(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        metrics.rouge_l_zh,
    ),
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\n"
        "Now, write a one-page summary of the report.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in "
        "one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting "
        "transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        metrics.rouge_l,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        metrics.rouge_l,
    ),
    "vcsum": Task(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        metrics.rouge_l_zh,
    ),
    "trec": Task(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        None,
        chat=False,
        first_line=True,
    ),
    "triviaqa": Task(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        metrics.token_f1,
        chat=False,
        first_line=True,
    ),
    "samsum": Task(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        metrics.rouge_l,
        chat=False,
        first_line=True,
    ),
    "lsht": Task("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, None, chat=False, first_line=True),
    "passage_count": Task(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count "
        "of unique paragraphs after removing duplicates. The output format should only contain the number, such as "
        "1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        metrics.number_share,
    ),
    "passage_retrieval_en": Task(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of "
        'the paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", '
        "etc.\n\nThe answer is: ",
        32,
        metrics.number_share,
    ),
    "passage_retrieval_zh": Task(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        metrics.number_share,
    ),
    "lcc": Task(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, metrics.code_similarity, chat=False
    ),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        metrics.code_similarity,
        chat=False,
    ),
    "v2": Task(
        "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\nWhat is the "
        "correct answer to this question: {input}\n\nFormat your response as follows: "
        '"The correct answer is (insert answer here)".',
        128,
        metrics.choice,
    ),
}
EVEN = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum"),
    *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)  # the tasks of LongBench-E, whose lengths are spread evenly
CHINESE_WORDS = ("multifieldqa_zh", "dureader", "vcsum")  # scored over words, which jieba has to find
