# SPDX-License-Identifier: MIT OR Apache-2.0
"""The whole model against transformers, for every family, way of cutting a prompt, and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.errors import CommandRefused
from metrale_ray.protocol.commands import Logits, Slot
from tests.fixtures.group import Group
from tests.fixtures.route import SIGNATURES, experts_of_token, token_for, write_route
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE, random_prompt, reference, reference_greedy, reference_logits
from tests.model.variants import VARIANTS

LIMIT = 2e-5  # the promise is 1e-4
LENGTHS = (1, 2, 3, 4, 5, 16, 17, 63, 200)
WORLDS = (1, 2, 3, 4)
# What changes how experts are spread; the rest is replicated.
SPREAD = (
    "mixtral",
    "mixtral, 5 experts",
    "mixtral, 2 experts",
    "qwen3",
    "qwen3, top 1",
    "qwen3, mixed layers",
    "qwen3, all dense",
    "qwen3, tied",
)
TINY = Callable[[str], Path]
REFERENCE = Callable[[str], Any]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference; infinite for NaN."""
    assert got.shape == want.shape
    return float(torch.nan_to_num((got - want).abs(), nan=torch.inf).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_prompts_of_1_to_200_tokens_equal_the_reference(
    variant: str, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group = Group(tiny(variant))
    for slot, length in enumerate(LENGTHS):
        prompt = random_prompt(length)
        assert error(group.prompt(slot, prompt), reference_logits(tiny_reference(variant), prompt)) < LIMIT
        group.free(slot)


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("variant", SPREAD)
def test_logits_equal_the_reference_on_every_number_of_ranks(
    variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group = Group(tiny(variant), world)
    for slot, length in enumerate((1, 2, 33)):
        prompt = random_prompt(length)
        assert error(group.prompt(slot, prompt), reference_logits(tiny_reference(variant), prompt)) < LIMIT


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("variant", ["mixtral", "mixtral, window", "qwen3, mixed layers", "qwen3, yarn rope"])
def test_a_prompt_in_chunks_gives_the_logits_of_one_pass(
    variant: str, chunk: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group, prompt = Group(tiny(variant), 2), random_prompt(50)
    assert error(group.prompt(0, prompt, chunk), reference_logits(tiny_reference(variant), prompt)) < LIMIT


@pytest.mark.parametrize(("variant", "world"), [("mixtral, window", 1), ("mixtral", 3), ("qwen3", 2), ("qwen3", 4)])
def test_32_greedy_tokens_equal_the_reference(variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE) -> None:
    prompt = random_prompt(9)
    assert Group(tiny(variant), world).greedy(0, prompt, 32) == reference_greedy(tiny_reference(variant), prompt, 32)


@pytest.mark.parametrize("variant", ["mixtral", "mixtral, window", "qwen3"])
def test_rows_of_different_lengths_decode_as_one_batch(variant: str, tiny: TINY, tiny_reference: REFERENCE) -> None:
    group = Group(tiny(variant), 3, num_blocks=256)
    prompts = {slot: random_prompt(length) for slot, length in enumerate((3, 1, 40, 17, 300))}
    for slot, prompt in prompts.items():
        group.step((slot, prompt[:-1] or prompt, Logits.LAST))
    rows = [slot for slot in prompts if len(prompts[slot]) > 1]
    got = group.step(*[(slot, prompts[slot][-1:], Logits.LAST) for slot in rows], method="decode_batch")
    for row, slot in enumerate(rows):
        assert error(got[row], reference_logits(tiny_reference(variant), prompts[slot])[-1]) < LIMIT


@pytest.mark.parametrize("variant", ["mixtral", "mixtral, window", "qwen3, mixed layers"])
@pytest.mark.parametrize("world", [1, 4])
def test_decode_rows_and_chunks_run_in_one_pass_and_logits_come_in_the_order_of_the_rows(
    variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group, model = Group(tiny(variant), world), tiny_reference(variant)
    first, second, third, fourth = (random_prompt(n) for n in (12, 30, 21, 1))
    group.step((0, first[:-1], Logits.NONE), (1, second[:10], Logits.NONE))
    got = group.step(
        (2, third, Logits.LAST), (0, first[-1:], Logits.LAST), (1, second[10:], Logits.ALL), (3, fourth, Logits.LAST)
    )
    want = torch.cat(
        (
            reference_logits(model, third)[-1:],
            reference_logits(model, first)[-1:],
            reference_logits(model, second)[10:],
            reference_logits(model, fourth),
        )
    )
    assert error(got, want) < LIMIT


def test_logits_are_computed_only_for_the_rows_asked(tiny: TINY) -> None:
    group, prompt = Group(tiny("qwen3")), random_prompt(6)
    assert group.step((0, prompt, Logits.NONE)).shape == (0, VOCAB_SIZE)
    assert group.step((1, prompt, Logits.LAST)).shape == (1, VOCAB_SIZE)
    assert group.step((2, prompt, Logits.ALL)).shape == (6, VOCAB_SIZE)


@pytest.mark.parametrize("variant", ["mixtral, window", "qwen3"])
def test_stale_rows_of_the_cache_change_no_bit_even_when_they_are_nan(variant: str, tiny: TINY) -> None:
    prompts = [random_prompt(n) for n in (7, 18)]

    def run(poison: bool) -> torch.Tensor:
        group = Group(tiny(variant), 2, poison=poison)
        group.step(*[(slot, prompt[:-1], Logits.LAST) for slot, prompt in enumerate(prompts)])
        return group.step(*[(slot, prompt[-1:], Logits.LAST) for slot, prompt in enumerate(prompts)])

    assert torch.equal(run(poison=True), run(poison=False))


def test_a_slot_used_again_shows_nothing_of_its_last_sequence(tiny: TINY) -> None:
    group, prompt = Group(tiny("mixtral"), 2, num_blocks=16), random_prompt(20)
    before = group.prompt(0, prompt)
    for length in (50, 3, 64):
        group.free(0)
        group.prompt(0, random_prompt(length))
    group.free(0)
    assert torch.equal(group.prompt(0, prompt), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["mixtral", "qwen3", "qwen3, all dense"])
def test_16_bit_logits_are_as_close_to_fp32_as_those_of_the_reference(
    variant: str, dtype: torch.dtype, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    exact, rounded = tiny_reference(variant), reference(tiny(variant), dtype)
    group = Group(tiny(variant), 2, dtype=dtype)
    ours, theirs = [], []
    for slot, length in enumerate((1, 8, 40, 100)):
        prompt = random_prompt(length)
        want = reference_logits(exact, prompt)
        ours.append((group.prompt(slot, prompt) - want).abs().flatten())
        theirs.append((reference_logits(rounded, prompt) - want).abs().flatten())
    # The means: the largest single error is chance, as another expert may be chosen at a near tie.
    assert torch.cat(ours).mean() <= 1.05 * torch.cat(theirs).mean()


@pytest.mark.parametrize("world", WORLDS)
def test_every_expert_answers_for_exactly_its_tokens(world: int, tmp_path: Path) -> None:
    folder = write_route(tmp_path)
    model, group = reference(folder), Group(folder, world)
    for token in range(0, SIGNATURES[0], 13):
        got = group.prompt(0, [token])
        group.free(0)
        assert error(got, reference_logits(model, [token])) < LIMIT
        raised = sorted(SIGNATURES, key=lambda signature: -got[0, signature])[:2]
        assert tuple(SIGNATURES.index(signature) for signature in raised) == experts_of_token(token)


@pytest.mark.parametrize("silenced", [0, 3, 7])
def test_silencing_one_expert_changes_exactly_the_tokens_routed_to_it(silenced: int, tmp_path: Path) -> None:
    whole, without = Group(write_route(tmp_path / "a"), 4), Group(write_route(tmp_path / "b", silenced=silenced), 4)
    tokens = list(range(0, SIGNATURES[0], 3))
    rows = [(slot, [token], Logits.LAST) for slot, token in enumerate(tokens)]
    changed = (whole.step(*rows) != without.step(*rows)).any(dim=1)
    assert changed.tolist() == [silenced in experts_of_token(token) for token in tokens]


@pytest.mark.parametrize("pair", [(0, 1), (6, 7), (7, 6)])
def test_ranks_without_a_token_take_part_in_every_step(pair: tuple[int, int], tmp_path: Path) -> None:
    token = token_for(*pair)
    one, four = Group(write_route(tmp_path)), Group(tmp_path, 4)
    for slot, count in enumerate((1, 64)):
        assert torch.equal(one.prompt(slot, [token] * count), four.prompt(slot, [token] * count))
    for _ in range(50):
        row = (0, [token], Logits.LAST)
        assert torch.equal(one.step(row, method="decode"), four.step(row, method="decode"))


def test_every_rank_enters_as_many_reductions_as_it_announces(tiny: TINY) -> None:
    for variant, count in (("mixtral", 3), ("qwen3, mixed layers", 2), ("qwen3, all dense", 0)):
        group = Group(tiny(variant), 2)
        group.prompt(0, random_prompt(3))
        assert [model.num_reductions() for model in group.models] == [count, count]
        assert [model._collectives._remaining for model in group.models] == [0, 0]


def test_hidden_states_have_the_same_bits_on_every_rank(tiny: TINY, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tiny("qwen3"), 3)
    seen: list[torch.Tensor] = []
    for model in group.models:
        hidden = model._decoder.hidden
        monkeypatch.setattr(model._decoder, "hidden", lambda step, run=hidden: seen.append(run(step)) or seen[-1])
    group.prompt(0, random_prompt(20))
    assert len(seen) == 3
    assert all(torch.equal(other, seen[0]) for other in seen)


def test_the_successor_checkpoint_generates_its_chain(tmp_path: Path) -> None:
    successors: Sequence[int] = [(7 * token + 3) % VOCAB_SIZE for token in range(VOCAB_SIZE)]
    group, chain = Group(write_succ(tmp_path, successors), 2), [5]
    for _ in range(20):
        chain.append(successors[chain[-1]])
    assert group.greedy(0, chain[:1], 20) == chain[1:]
    probabilities = group.prompt(1, [5]).softmax(-1)
    assert float(probabilities.max()) == pytest.approx(0.999995, abs=1e-6)


def test_a_slot_is_allocated_and_freed_exactly_once(tiny: TINY) -> None:
    model = Group(tiny("mixtral")).models[0]
    seq = model.alloc_sequence(Slot(3))
    with pytest.raises(CommandRefused, match="holds a sequence already"):
        model.alloc_sequence(Slot(3))
    model.free_sequence(seq)
    with pytest.raises(CommandRefused, match="free already"):
        model.free_sequence(seq)


def test_a_model_that_was_torn_down_refuses_to_run(tiny: TINY) -> None:
    group = Group(tiny("mixtral"))
    group.prompt(0, [1, 2])
    for _ in range(2):
        group.models[0].teardown()
    assert group.models[0].num_total_blocks == 0
    with pytest.raises(CommandRefused, match="nothing is loaded"):
        group.step((0, [3], Logits.LAST))


def test_the_first_of_equal_logits_wins(tiny: TINY) -> None:
    model = Group(tiny("mixtral")).models[0]
    assert model.argmax_batch(torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])) == [1, 0]
    assert model.to_host(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
