"""A prompt is read from every form that tokenizers and models give it in; what is none is refused in a short line."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.cache_name import CACHE_NAME
from tests.engines.transformers.conftest import MakeEngine
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BatchEncoding, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvtier.engines.transformers.token_ids import TokenIds, read_token_ids
from kvtier.errors import ConfigError

VOCABULARY = 97
IDS = [5, 6, 7]
LONGEST_MESSAGE = 400


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, and a chat template."""
    words = {f"w{index}": index for index in range(VOCABULARY)}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))  # noqa: S106 - a token of a vocabulary
    backend.pre_tokenizer = Whitespace()
    make: Any = PreTrainedTokenizerFast  # Any: transformers is not annotated
    made = make(tokenizer_object=backend, pad_token="w0")  # noqa: S106 - as above
    made.chat_template = "{% for message in messages %}{{ message['content'] }} w1 {% endfor %}"
    return cast("PreTrainedTokenizerFast", made)


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        [IDS],
        np.array(IDS),
        np.array([IDS]),
        list(np.array(IDS)),
        torch.tensor(IDS),
        torch.tensor([IDS]),
        {"input_ids": IDS, "attention_mask": [1, 1, 1]},
        BatchEncoding({"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 3)}),
        BatchEncoding({"input_ids": [IDS], "token_type_ids": [[0, 0, 0]]}),
        GenerateDecoderOnlyOutput(sequences=torch.tensor([IDS])),  # type: ignore[arg-type]  # its stub wants LongTensor
    ],
)
def test_one_sequence_is_read_from_every_form(given: TokenIds) -> None:
    read = read_token_ids(given, VOCABULARY)

    assert read == IDS
    assert {type(token_id) for token_id in read} == {int}


def test_a_chat_template_is_served_as_the_tokenizer_returns_it(
    llama: LlamaForCausalLM, make_engine: MakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = make_engine(llama)
    chat = [{"role": "user", "content": "w5 w6 w7 " * 10}]
    as_batch: Any = tokenizer.apply_chat_template(
        chat, return_tensors="pt"
    )  # Any: its type is that of its options
    as_tensor: Any = tokenizer.apply_chat_template(
        chat, return_tensors="pt", return_dict=False
    )  # Any: the same
    expected = engine.run([5, 6, 7] * 10 + [1], 4).tokens

    assert isinstance(as_batch, BatchEncoding)
    assert tuple(as_tensor.shape) == (1, 31)
    assert engine.run(as_batch, 4).tokens == expected
    assert engine.run(as_tensor, 4).tokens == expected
    assert engine.cache_for(as_batch).sources == {"device": 24, "computed": 7}


def test_what_generate_returns_as_a_dict_is_committed(
    llama: LlamaForCausalLM, make_engine: MakeEngine, prompt: list[int]
) -> None:
    engine = make_engine(llama)
    cache = engine.cache_for(prompt)
    output = cast("Any", llama).generate(  # Any: the annotations of transformers do not fit its models
        torch.tensor([prompt]),
        **{CACHE_NAME: cache},
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )

    assert cache.commit(output) == len(prompt) + 5
    assert engine.cache_for(output.sequences).sources == {"device": 80, "computed": 1}


@pytest.mark.parametrize(
    "make",
    [
        torch.tensor,
        np.array,
        lambda rows: rows,
        lambda rows: BatchEncoding({"input_ids": torch.tensor(rows)}),
        lambda rows: GenerateDecoderOnlyOutput(sequences=torch.LongTensor(rows)),
    ],
)
def test_several_sequences_are_refused_with_their_shape(make: Callable[[list[list[int]]], TokenIds]) -> None:
    with pytest.raises(ConfigError, match=r"token_ids=\(4, 8750\).*one sequence at a time") as caught:
        read_token_ids(make([[5] * 8750] * 4), VOCABULARY)
    assert len(str(caught.value)) < LONGEST_MESSAGE


def test_several_prompts_are_refused_by_the_engine_and_by_a_cache(
    llama: LlamaForCausalLM, make_engine: MakeEngine, prompt: list[int]
) -> None:
    engine = make_engine(llama)
    cache = engine.cache_for(prompt)
    both = torch.tensor([prompt, prompt])

    for refuse in (lambda: engine.run(both, 1), lambda: engine.cache_for(both), lambda: cache.commit(both)):
        with pytest.raises(ConfigError, match=r"\(2, 75\)"):
            refuse()


def test_an_iterator_of_ids_is_a_sequence_of_them() -> None:
    assert read_token_ids(iter([1, 2]), VOCABULARY) == [1, 2]  # type: ignore[arg-type]  # what users give
    assert read_token_ids((token_id for token_id in [3, 4]), VOCABULARY) == [3, 4]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a prompt of text", "<class 'str'>.*a list or a tensor of shape.*apply_chat_template"),
        (b"bytes", "<class 'bytes'>"),
        (None, "<class 'NoneType'>"),
        (7, "<class 'int'>"),
        (object(), "<class 'object'>"),
        (["a", "b"], "<class 'str'>.*whole number"),
        ([5, "x" * 40_000], "<class 'str'>"),
        ([1.5], "token_ids=1.5"),
        ([True], "token_ids=True"),
        ([5, None], "token_ids=None"),
        (torch.rand(8750), "every id must be a whole number"),
        (torch.zeros(1, 2, 3), r"\(1, 2, 3\)"),
        ([], "at least one token"),
        (iter([]), "at least one token"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
        ({"ids": [5]}, "dict with ids.*neither input_ids nor sequences"),
        ({}, "dict with nothing"),
        ([5] * 9000 + [VOCABULARY], f"token_ids={VOCABULARY}: the model's ids are below"),
    ],
)
def test_what_is_no_sequence_of_ids_is_refused_by_its_type(given: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message) as caught:
        read_token_ids(given, VOCABULARY)
    assert len(str(caught.value)) < LONGEST_MESSAGE


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (
            {"attention_mask": torch.tensor([[0, 1, 1]])},
            r"attention_mask='values of shape \(1, 3\)'.*without padding",
        ),
        ({"token_type_ids": [[0, 1, 1]]}, "token_type_ids.*one text alone"),
        ({"mm_token_type_ids": torch.tensor([[0, 1, 0]])}, "mm_token_type_ids"),
        (
            {"pixel_values": torch.rand(1, 3, 224, 224)},
            "pixel_values=<class 'torch.Tensor'>: is an input besides",
        ),
    ],
)
def test_inputs_that_ids_do_not_name_are_refused(
    beside: Mapping[str, Any], message: str
) -> None:  # Any: as given
    with pytest.raises(ConfigError, match=message) as caught:
        read_token_ids({"input_ids": torch.tensor([IDS]), **beside}, VOCABULARY)
    assert len(str(caught.value)) < LONGEST_MESSAGE


def test_a_padded_text_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    padded = tokenizer("w5 w6", padding="max_length", max_length=8, return_tensors="pt")

    with pytest.raises(ConfigError, match="without padding"):
        read_token_ids(padded, VOCABULARY)


def test_an_output_of_another_prompt_is_refused_without_its_values(
    llama: LlamaForCausalLM, make_engine: MakeEngine, prompt: Sequence[int]
) -> None:
    cache = make_engine(llama).cache_for(prompt)

    with pytest.raises(
        ConfigError, match=r"9000 tokens that begin with .*must begin with the prompt"
    ) as caught:
        cache.commit([1] * 9000)
    assert len(str(caught.value)) < LONGEST_MESSAGE
