"""How prompts and steps are written in a model's tokens."""

from __future__ import annotations

from dataclasses import replace

import chat_models
import pytest
import tiny_models
from transformers import PreTrainedTokenizerFast

from models_jax.config import ModelConfig, RewardHead
from models_jax.text_format import SYSTEM, TextFormat
from models_jax.tokenizer import Tokenizer
from planner.errors import UserError

QUESTION, DELIMITER = "What is 12 + 1?", "\n\n"
OTHER_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '|' + (m.content | trim) + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant|' }}{% endif %}"
)


def text_format(folder, head: RewardHead | None = None, **changes) -> TextFormat:
    shape = tiny_models.config("qwen2").to_dict() | changes
    config = replace(ModelConfig.from_dict(shape, "config.json"), reward_head=head)
    return TextFormat(Tokenizer(folder), folder, DELIMITER, config)


@pytest.mark.parametrize("template", [chat_models.TEMPLATE, OTHER_TEMPLATE])
@pytest.mark.parametrize("beside", [False, True])
def test_prompts_are_those_of_transformers(tmp_path, template, beside):
    chat_models.write_tokenizer(tmp_path, template=None if beside else template, bos="<|endoftext|>")
    if beside:
        (tmp_path / "chat_template.jinja").write_text(template)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert text_format(tmp_path).prompt(QUESTION + DELIMITER) == tuple(theirs)


def test_a_model_without_template_reads_the_prompt_as_it_is(tmp_path):
    made = chat_models.write_tokenizer(tmp_path, template=None)
    assert list(text_format(tmp_path).prompt(QUESTION + DELIMITER)) == made.encode(QUESTION + DELIMITER).ids


def test_a_prompt_begins_as_the_tokenizer_has_it(tmp_path):
    from tokenizers.processors import TemplateProcessing

    made = chat_models.write_tokenizer(tmp_path, template=None)
    begin = made.token_to_id("<|endoftext|>")
    made.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)])
    made.save(str(tmp_path / "tokenizer.json"))
    found = text_format(tmp_path)
    assert found.prompt("12")[0] == begin
    assert begin not in found.step("12")


def test_steps_are_written_with_their_delimiter(tmp_path):
    made = chat_models.write_tokenizer(tmp_path)
    found = text_format(tmp_path)
    assert list(found.step("It is 13." + DELIMITER)) == made.encode("It is 13." + DELIMITER).ids
    assert found.hash == Tokenizer(tmp_path).hash


def test_qwen_prm_reads_its_separator_for_the_delimiter(tmp_path):
    made = chat_models.write_tokenizer(tmp_path, chat_models.SEPARATOR)
    found = text_format(tmp_path, RewardHead.TWO_CLASS)
    steps = ["First 12.", "Then\n13."]
    whole = found.prompt(QUESTION + DELIMITER) + sum((found.step(step + DELIMITER) for step in steps), ())
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    answer = "".join(step + chat_models.SEPARATOR for step in steps)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        [*messages, {"role": "assistant", "content": answer}], tokenize=False
    )
    end = theirs.index(answer) + len(answer)
    assert list(whole) == made.encode(theirs[:end]).ids
    assert found.step(steps[0] + DELIMITER)[-1] == made.token_to_id(chat_models.SEPARATOR)


def test_a_reader_of_separators_takes_text_from_others(tmp_path):
    chat_models.write_tokenizer(tmp_path, chat_models.SEPARATOR)
    assert text_format(tmp_path, RewardHead.TWO_CLASS).hash != text_format(tmp_path).hash


def test_a_two_class_model_without_the_separator_reads_the_delimiter(tmp_path):
    made = chat_models.write_tokenizer(tmp_path, template=None)
    found = text_format(tmp_path, RewardHead.TWO_CLASS)
    assert list(found.step("13." + DELIMITER)) == made.encode("13." + DELIMITER).ids


def test_skywork_begins_with_its_token_and_reads_lines(tmp_path):
    made = chat_models.write_tokenizer(tmp_path, bos="<|endoftext|>")
    found = text_format(tmp_path, RewardHead.SCALAR)
    whole = found.prompt(QUESTION + DELIMITER) + found.step("It is 13." + DELIMITER)
    line = made.token_to_id("Ċ")
    begin = made.encode(f"<|endoftext|>{QUESTION}\n").ids
    assert list(whole) == [*begin, *made.encode("It is 13.").ids, line]


def test_math_shepherd_reads_its_tag(tmp_path):
    made = chat_models.write_tokenizer(tmp_path, "ки")
    found = text_format(tmp_path, RewardHead.TOKENS, reward_tokens=[3, 4])
    assert found.step("Step 1: 13" + DELIMITER)[-1] == made.token_to_id("ки")
    assert list(found.prompt(QUESTION + DELIMITER)) == made.encode(QUESTION + " ").ids


def test_a_separator_of_several_tokens_is_refused(tmp_path):
    chat_models.write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="step separator 'ки' is not one token"):
        text_format(tmp_path, RewardHead.TOKENS)
    with pytest.raises(UserError, match="step separator '<step>' is not one token"):
        text_format(tmp_path, RewardHead.TWO_CLASS, step_separator="<step>")


def test_the_day_does_not_matter(tmp_path):
    template = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    made = chat_models.write_tokenizer(tmp_path, template=template + "{{ date_string }}{{ messages[0].content }}")
    assert list(text_format(tmp_path).prompt("12")) == made.encode("26 Jul 202412").ids


def test_a_template_that_fails_is_named(tmp_path):
    chat_models.write_tokenizer(tmp_path, template="{{ raise_exception('no such role') }}")
    with pytest.raises(UserError, match=r"chat template fails .*no such role"):
        text_format(tmp_path).prompt("12")
