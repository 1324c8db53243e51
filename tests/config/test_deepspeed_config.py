"""DeepSpeed's JSON: read as users write it, and never half understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rostra.config.deepspeed import deepspeed_config, fill_auto, layout_keys, read_deepspeed
from rostra.config.deepspeed_keys import KEYS
from rostra.config.schema import OptimizerSection
from rostra.errors import RequestError
from rostra.layout import Layout
from support import GUIDE


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(text)
    return read_deepspeed(path)


def config_of(
    layout: Layout, user: dict[str, Any] | None = None, clip: float | None = 1.0, **more: Any
) -> dict[str, Any]:
    asked = {"samples": 64, "parameters": 10**9, **more}
    return deepspeed_config(layout, OptimizerSection(), clip=clip, user=user, **asked)


def guide_layout(user: dict[str, Any], **keys: Any) -> Layout:
    found: dict[str, Any] = {"micro_batch": 4, "accumulation": 8, "compute": "bf16", "shard": 2}
    return Layout(engine="deepspeed", **{**found, **layout_keys(user), **keys})


def test_the_guides_file_is_taken_as_it_is(tmp_path: Path) -> None:
    user = read(tmp_path, GUIDE)
    zero = user["zero_optimization"]
    assert (zero["sub_group_size"], zero["reduce_bucket_size"]) == (10**9, 5 * 10**8)
    assert isinstance(zero["sub_group_size"], int)
    layout = guide_layout(user)
    assert layout.sharding == "full_shard"
    assert layout.offload_optimizer == layout.offload_parameters == "cpu"
    config = config_of(layout, user)
    for key, value in zero.items():
        assert config["zero_optimization"][key] == value
    assert config["bf16"] == {"enabled": True}


def test_comments_commas_and_numbers(tmp_path: Path) -> None:
    user = read(
        tmp_path,
        """// first
        {"zero_optimization": {"stage": 2.0, /* a, } */ "sub_group_size": "1e9", # here
         "reduce_bucket_size": 1000, // the last,
        }, "communication_data_type": "a // b, } # c /* d */",
        "gradient_clipping": "0.5", "steps_per_print": "auto",}
        """,
    )
    assert user == {
        "zero_optimization": {"stage": 2, "sub_group_size": 10**9, "reduce_bucket_size": 1000},
        "communication_data_type": "a // b, } # c /* d */",
        "gradient_clipping": 0.5,
        "steps_per_print": "auto",
    }


def test_the_case_of_keys_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"ZeRO_optimization": {"Stage": 3}}')
    assert read_deepspeed(str(path)) == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"zero_optimization": {}, "ZeRO_optimization": {}}', "zero_optimization` is given twice"),
        ('{"zero_optimization": {"overlap_com": true}}', "overlap_com`.*`overlap_comm`"),
        ('{"qwertz": 1}', "`qwertz` is not a key.*known: train_batch_size"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "disk"}}}', "none, cpu, nvme"),
        ('{"zero_optimization": {"sub_group_size": 1.5}}', "a whole number, not 1.5"),
        ('{"zero_optimization": {"overlap_comm": "yes"}}', "true or false, not 'yes'"),
        ('{"zero_optimization": true}', "must be a block"),
        ('{"gradient_clipping": true}', "a number, not True"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "given twice"),
        ('{"elasticity": {"enabled": true}}', "`elasticity` is not taken: Rostra resumes"),
        ('{"zero_optimization": {"cpu_offload": true}}', '"offload_optimizer"'),
        ('{"gradient_clipping": }', "JSON.*line 1 column"),
        ("[1]", "must be a block"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        read_deepspeed(tmp_path / "none.json")


def test_every_known_key_is_one_of_deepspeeds() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, offload_config

    models = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    for path, model in models.items():
        keys: Any = KEYS
        for part in path.split("."):
            keys = keys[part]
        theirs = {field.alias or name for name, field in model.model_fields.items()}
        assert set(keys) <= theirs, path


@pytest.mark.parametrize(
    ("sharding", "stage"),
    [("no_shard", 0), ("zero1", 1), ("shard_grad_op", 2), ("full_shard", 3)],
)
def test_a_config_from_rostras_own_keys(sharding: Any, stage: int) -> None:
    ranks = {"replicate" if stage == 0 else "shard": 2}
    config = config_of(Layout(2, 3, engine="deepspeed", sharding=sharding, **ranks))
    assert config["zero_optimization"]["stage"] == stage
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.0


def test_offloads_from_rostras_own_keys() -> None:
    layout = Layout(
        1,
        1,
        engine="deepspeed",
        sharding="full_shard",
        offload_parameters="cpu",
        offload_optimizer="nvme",
    )
    zero = config_of(layout, nvme_path="/fast")["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu"}
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/fast"}
    with pytest.raises(RequestError, match=r"memory\.offload\.path"):
        config_of(layout)


def test_auto_is_filled() -> None:
    user = {"a": "auto", "b": {"c": "auto", "d": 1}, "e": "auto"}
    assert fill_auto(user, {"a": 2, "b": {"c": 3, "d": 4, "f": 5}}) == {
        "a": 2,
        "b": {"c": 3, "d": 1, "f": 5},
    }


def test_a_file_full_of_autos() -> None:
    user = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    layout = Layout(2, 1, engine="deepspeed", sharding="shard_grad_op", shard=2)
    config = config_of(layout, user)
    assert "'auto'" not in str(config)
    assert config["zero_optimization"]["reduce_bucket_size"] == 50_000_000
    assert not {"optimizer", "scheduler", "fp16", "train_batch_size"} & set(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_batch_size": 32}, "train_batch_size = 32.*train.global_batch_size = 64"),
        ({"train_micro_batch_size_per_gpu": 2}, "per_gpu = 2, but train.micro_batch_size = 4"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps = 1.* = 8"),
        ({"gradient_clipping": 0.3}, "gradient_clipping = 0.3, but stability.clip = 1.0"),
        ({"bf16": {"enabled": True}}, "bf16.enabled = true.*precision.compute = fp32"),
        ({"fp16": {"enabled": True}}, "fp16.enabled = true.*precision.compute"),
        (
            {"zero_optimization": {"stage": 1}},
            r"stage = 1, but .*parallel.sharding \(full_shard\) = 3",
        ),
        ({"optimizer": {"type": "Lamb"}}, "type = Lamb, but optimizer.name = adamw"),
        ({"optimizer": {"params": {"lr": 1.0}}}, "lr = 1.0, but optimizer.learning_rate"),
        ({"scheduler": {"params": {"warmup_num_steps": 9}}}, "warmup_num_steps = 9.*schedule"),
    ],
)
def test_conflicts_name_both_values(change: dict[str, Any], said: str) -> None:
    layout = Layout(4, 8, engine="deepspeed", sharding="full_shard", shard=2)
    with pytest.raises(RequestError, match=said):
        config_of(layout, change)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sharding": "hybrid_shard"}, "sharding = hybrid_shard.*ZeRO-2.*full_shard"),
        ({"offload_optimizer": "cpu"}, "offload.optimizer = cpu.*set parallel.sharding: zero1"),
        ({"sharding": "zero1", "offload_optimizer": "nvme"}, "ZeRO-3 only"),
        (
            {"sharding": "zero1", "offload_parameters": "cpu", "offload_optimizer": "cpu"},
            "ZeRO-3 only",
        ),
    ],
)
def test_layouts_that_deepspeed_cannot_execute(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        config_of(Layout(1, 1, engine="deepspeed", **keys))


def test_a_stage_that_there_is_not() -> None:
    with pytest.raises(RequestError, match="must be 0, 1, 2 or 3"):
        layout_keys({"zero_optimization": {"stage": 4}})


@pytest.mark.parametrize(("largest", "numbers"), [(10**6, 10**8), (10**9, 250_000_000)])
def test_a_part_of_the_largest_parameter_fits_a_buffer_of_nvme(largest: int, numbers: int) -> None:
    layout = Layout(
        1,
        1,
        engine="deepspeed",
        shard=4,
        sharding="full_shard",
        offload_parameters="nvme",
        offload_optimizer="nvme",
    )
    made = deepspeed_config(
        layout,
        OptimizerSection(),
        clip=None,
        samples=4,
        parameters=10**10,
        largest=largest,
        nvme_path="/nvme",
    )
    assert made["zero_optimization"]["offload_param"]["buffer_size"] == numbers
