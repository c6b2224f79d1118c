# SPDX-License-Identifier: MIT OR Apache-2.0
"""Families without experts: the logits of transformers at any number of ranks, and failures known from replies only."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from metrale_ray.config import FaultSpec, Phase
from metrale_ray.errors import CheckpointError, Desync
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.families import family_of
from metrale_ray.model.weights import plan_weights, read_decoder_config
from metrale_ray.protocol.commands import Logits
from tests.fixtures.group import Group
from tests.fixtures.tiny import random_prompt, reference, reference_greedy, reference_logits
from tests.harness import Driver, Outcome, run_engine
from tests.model.variants import DENSE, LLAMA3_ROPE, ROPE, WINDOW

LIMIT = 2e-5  # the promise is 1e-4
PLAIN = ("llama", "dense qwen3")
WINDOWED = "dense qwen3, window in later layers"
WORLDS = (1, 2, 3, 4)
TINY = Callable[[str], Path]
REFERENCE = Callable[[str], Any]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference; infinite for NaN."""
    assert got.shape == want.shape
    return float(torch.nan_to_num((got - want).abs(), nan=torch.inf).max())


@pytest.mark.parametrize("variant", DENSE)
def test_logits_of_prompts_equal_the_reference(variant: str, tiny: TINY, tiny_reference: REFERENCE) -> None:
    group = Group(tiny(variant))
    for slot, length in enumerate((1, 2, 5, 17, 200)):
        prompt = random_prompt(length)
        assert error(group.prompt(slot, prompt), reference_logits(tiny_reference(variant), prompt)) < LIMIT
        group.free(slot)


SWITCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"rms_norm_eps": 0.3}),
    ("llama", {"hidden_act": "relu"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", **ROPE}}),
    ("dense qwen3", {"rms_norm_eps": 0.3}),
    ("dense qwen3", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    ("dense qwen3", {**WINDOW, "max_window_layers": 0}),
    ("dense qwen3", {**WINDOW, "max_window_layers": 1}),
    ("dense qwen3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
)


def copy_of(folder: Path, to: Path, changes: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """The checkpoint in `folder` with changes to its config.json alone, and with more tensors; layer_types dropped."""
    to.mkdir()
    config = {**json.loads((folder / "config.json").read_text()), "layer_types": None, **changes}
    (to / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(folder / "model.safetensors") | (tensors or {})
    safetensors.torch.save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(("variant", "changes"), SWITCHES)
def test_a_switch_changed_in_the_configuration_alone_changes_the_logits_as_in_the_reference(
    variant: str, changes: dict[str, Any], tiny: TINY, tiny_reference: REFERENCE, tmp_path: Path
) -> None:
    prompt = random_prompt(60)
    edited = copy_of(tiny(variant), tmp_path / "edited", changes)
    got = Group(edited).prompt(0, prompt)
    assert error(got, reference_logits(reference(edited), prompt)) < LIMIT
    assert error(got, reference_logits(tiny_reference(variant), prompt)) > 100 * LIMIT


@pytest.mark.parametrize(
    ("variant", "changes", "named"),
    [
        ("llama", {"attention_bias": True}, "missing from the checkpoint: .*q_proj.bias"),
        ("llama", {"mlp_bias": True}, "missing from the checkpoint: .*gate_proj.bias"),
        ("llama, mlp biases", {"mlp_bias": False}, "not part of this model: .*down_proj.bias"),
        ("llama", {"head_dim": 12}, "of another shape"),
        ("llama", {"num_key_value_heads": 4}, "of another shape"),
        ("llama", {"sliding_window": 5}, "sets sliding_window to 5, which is not supported"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llama", {"hidden_act": "mish"}, "hidden_act to 'mish'"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("dense qwen3", {"head_dim": None}, "of another shape"),
        ("dense qwen3", {"layer_types": ["full_attention"] * 2}, "one of full_attention for each of the 3 layers"),
        ("dense qwen3", {"layer_types": ["sliding_attention"] * 3}, "needs use_sliding_window and sliding_window"),
        ("dense qwen3", {**WINDOW, "layer_types": ["chunked_attention"] * 3}, "full_attention, sliding_attention"),
        ("dense qwen3", {**WINDOW, "layer_types": "full_attention"}, "layer_types"),
        ("dense qwen3", {**WINDOW, "sliding_window": 0}, "sliding_window"),
        ("dense qwen3", {**WINDOW, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_a_switch_that_the_checkpoint_contradicts_or_nothing_honours_is_refused_by_name(
    variant: str, changes: dict[str, Any], named: str, tiny: TINY, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(copy_of(tiny(variant), tmp_path / "edited", changes)))
    with pytest.raises(CheckpointError, match=named):
        plan_weights(checkpoint, read_decoder_config(checkpoint), 1, 2)


@pytest.mark.parametrize("variant", ["llama, tied", "dense qwen3, tied"])
def test_a_head_that_is_stored_counts_even_where_the_configuration_ties_it(
    variant: str, tiny: TINY, tmp_path: Path
) -> None:
    prompt = random_prompt(9)
    embedding = safetensors.torch.load_file(tiny(variant) / "model.safetensors")["model.embed_tokens.weight"]
    plain = Group(tiny(variant)).prompt(0, prompt)
    same = copy_of(tiny(variant), tmp_path / "same", {}, {"lm_head.weight": embedding.clone()})
    other = copy_of(tiny(variant), tmp_path / "other", {}, {"lm_head.weight": embedding.flip(0)})
    assert torch.equal(Group(same).prompt(0, prompt), plain)
    assert error(Group(other).prompt(0, prompt), reference_logits(reference(other), prompt)) < LIMIT
    assert error(Group(other).prompt(0, prompt), plain) > 100 * LIMIT


def test_rotary_frequencies_that_old_checkpoints_store_are_not_read(tiny: TINY, tmp_path: Path) -> None:
    stored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(3)}
    folder, prompt = copy_of(tiny("llama"), tmp_path / "old", {}, stored), random_prompt(9)
    assert torch.equal(Group(folder).prompt(0, prompt), Group(tiny("llama")).prompt(0, prompt))


def test_defaults_are_those_of_the_reference() -> None:
    sizes = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    llama = read_config("LlamaForCausalLM", sizes)
    assert (llama.head_dim, llama.num_kv_heads, llama.rms_norm_eps, llama.rope.theta) == (12, 4, 1e-6, 10_000.0)
    qwen3 = read_config("Qwen3ForCausalLM", sizes)
    assert (qwen3.head_dim, qwen3.windows, qwen3.rope.theta) == (128, (None,) * 30, 10_000.0)
    windowed = read_config("Qwen3ForCausalLM", {**sizes, "use_sliding_window": True})
    assert windowed.windows == (None,) * 28 + (4096,) * 2
    without = read_config("Qwen3ForCausalLM", {**sizes, "use_sliding_window": True, "sliding_window": None})
    assert without.windows == (None,) * 30
    assert llama.moe is None
    assert qwen3.num_sparse_layers == 0


def read_config(architecture: str, values: dict[str, Any]) -> DecoderConfig:
    return family_of({"architectures": [architecture]}).read_config(values)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("variant", [*PLAIN, WINDOWED])
def test_chunks_batched_decode_and_mixed_steps_equal_the_reference_at_every_number_of_ranks(
    variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group, model = Group(tiny(variant), world, num_blocks=256), tiny_reference(variant)
    prompts = {slot: random_prompt(length) for slot, length in enumerate((30, 2, 17, 300))}
    want = {slot: reference_logits(model, prompt) for slot, prompt in prompts.items()}
    assert error(group.prompt(0, prompts[0][:-2], 5), want[0][:-2]) < LIMIT
    got = group.step(
        (1, prompts[1][:1], Logits.LAST), (0, prompts[0][-2:-1], Logits.LAST), (2, prompts[2][:-1], Logits.ALL)
    )
    assert error(got, torch.cat((want[1][:1], want[0][-2:-1], want[2][:-1]))) < LIMIT
    group.step((3, prompts[3][:-1], Logits.NONE))
    rows = [(slot, prompt[-1:], Logits.LAST) for slot, prompt in prompts.items()]
    got = group.step(*rows, method="decode_batch")
    assert error(got, torch.stack([logits[-1] for logits in want.values()])) < LIMIT
    assert [model.num_reductions() for model in group.models] == [0] * world


@pytest.mark.parametrize("variant", [*PLAIN, WINDOWED])
def test_greedy_tokens_equal_the_reference(variant: str, tiny: TINY, tiny_reference: REFERENCE) -> None:
    prompt = random_prompt(9)
    assert Group(tiny(variant), 2).greedy(0, prompt, 24) == reference_greedy(tiny_reference(variant), prompt, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", PLAIN)
def test_16_bit_logits_are_as_close_to_fp32_as_those_of_the_reference(
    variant: str, dtype: torch.dtype, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    prompt = random_prompt(120)
    want = reference_logits(tiny_reference(variant), prompt)
    ours = (Group(tiny(variant), dtype=dtype).prompt(0, prompt) - want).abs().mean()
    theirs = (reference_logits(reference(tiny(variant), dtype), prompt) - want).abs().mean()
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("variant", PLAIN)
def test_a_model_without_experts_says_once_that_more_ranks_do_not_help(
    variant: str, tiny: TINY, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Group(tiny(variant), 1)
        Group(tiny("qwen3"), 3)
    assert caplog.messages == []
    Group(tiny(variant), 3)
    assert len(caplog.messages) == 1
    assert "no experts to spread: each of the 3 ranks holds the whole model" in caplog.messages[0]


# Prompts of several lengths over a budget of 12 tokens: chunks, mixed steps, batches, and single rows at the end.
PROMPTS = [[11, *range(20, 40)], [12, 50, 51], [13, *range(60, 75)], [14, 80]]
SETTINGS: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 64}
FAILS = "injected fault"
VICTIM = 2
NUMBER = 5  # a command in the middle of the work
PHASES_WITHOUT_SUMS: tuple[Phase, ...] = ("validation", "reply")


def script(driver: Driver) -> None:
    for prompt in PROMPTS:
        driver.submit(prompt)
    driver.run()
    driver.engine.ping()
    driver.submit(PROMPTS[3])
    driver.run()


@pytest.fixture(scope="module")
def model(tiny: TINY) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def healthy(model: Path) -> Outcome:
    """The same jobs without a fault, on one rank."""
    return run_engine(model, script, **SETTINGS)


def check(outcome: Outcome, healthy: Outcome, failed: set[int]) -> None:
    """Everybody but `failed` got what a run without a fault gives, nothing is left, and every rank left in order."""
    assert outcome.head_error is None
    assert all(left is None for left in outcome.left.values()), outcome.left
    for number, expected in healthy.answers.items():
        answer = outcome.answers[number]
        assert answer.answers == 1
        if number in failed:
            assert answer.error == ("command_failed", FAILS)
        else:
            assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason), number
    assert outcome.stats["free_blocks"] == outcome.stats["total_blocks"]


@pytest.mark.parametrize("variant", PLAIN)
def test_tokens_are_the_references_at_1_to_4_ranks(variant: str, tiny: TINY, tiny_reference: REFERENCE) -> None:
    want = [reference_greedy(tiny_reference(variant), prompt, 8) for prompt in PROMPTS]
    for ep_size in WORLDS:
        outcome = run_engine(tiny(variant), script, ep_size=ep_size, **SETTINGS)
        assert outcome.head_error is None
        assert outcome.tokens() == [*want, want[3]]


@pytest.mark.parametrize("ep_size", WORLDS)
@pytest.mark.parametrize("blame", [False, True], ids=["searched", "blamed"])
def test_a_failure_known_from_a_reply_alone_ends_its_own_sequence(
    model: Path, healthy: Outcome, ep_size: int, blame: bool
) -> None:
    for rank in range(ep_size):
        for phase in PHASES_WITHOUT_SUMS:
            fault = FaultSpec(rank=rank, phase=phase, first_token=PROMPTS[VICTIM][0], blame=blame, message=FAILS)
            outcome = run_engine(model, script, ep_size=ep_size, faults=(fault,), **SETTINGS)
            assert outcome.stats["failed_commands"] >= 1
            check(outcome, healthy, {VICTIM})


@pytest.mark.parametrize("ep_size", WORLDS)
def test_a_slot_poisoned_on_one_rank_is_freed_everywhere_and_its_sequence_computed_anew(
    model: Path, healthy: Outcome, ep_size: int
) -> None:
    for rank in range(ep_size):
        for phase in PHASES_WITHOUT_SUMS:
            fault = FaultSpec(rank=rank, phase=phase, kind="poison", command=NUMBER, message=FAILS)
            outcome = run_engine(model, script, ep_size=ep_size, faults=(fault,), **SETTINGS)
            assert outcome.stats["failed_commands"] == 1
            check(outcome, healthy, set())


@pytest.mark.parametrize("ep_size", WORLDS[1:])
def test_a_rank_that_diverges_is_found_by_its_digest_and_named(model: Path, ep_size: int) -> None:
    for rank in range(1, ep_size):
        fault = FaultSpec(rank=rank, phase="reply", kind="diverge", command=NUMBER)
        outcome = run_engine(model, script, ep_size=ep_size, faults=(fault,), **SETTINGS)
        assert isinstance(outcome.head_error, Desync)
        assert outcome.head_error.rank == rank


def test_phases_around_a_sum_are_never_reached_as_there_is_none(model: Path, healthy: Outcome) -> None:
    faults = tuple(FaultSpec(rank=1, phase=phase, message=FAILS) for phase in ("before", "inside", "after"))
    check(run_engine(model, script, ep_size=2, faults=faults, **SETTINGS), healthy, set())
