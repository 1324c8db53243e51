from __future__ import annotations

from pathlib import Path

import pytest

from rostra.config import Config, config_from_dict, config_to_yaml, read_config
from rostra.errors import RequestError

GOOD = """\
model:
  preset: tiny
data:
  sources:
    - type: text
      path: books
  tokenizer: {vocabulary: 300}
train:
  steps: 1e2
optimizer:
  learning_rate: 3e-4
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        read_config(write(tmp_path, text), overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(tmp_path), "")


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GOOD))
    assert config.train.steps == 100
    assert config.optimizer.learning_rate == pytest.approx(3e-4)


def test_every_default_is_written_out_and_read_back(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GOOD))
    text = config_to_yaml(config)
    for section, field in Config.model_fields.items():
        assert f"{section}:" in text
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"{key}:" in text
    assert read_config(write(tmp_path, text)) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "trian: {}\n", "/config.yaml:12: trian: unknown key; did you mean `train`?"),
        (
            GOOD.replace("  steps:", "  stesp: 3\n  steps:"),
            "/config.yaml:9: train.stesp = 3: unknown key; did you mean `steps`?",
        ),
        (
            GOOD + "sequence_length: 4096\n",
            "/config.yaml:12: sequence_length = 4096: unknown key; "
            "did you mean `data.sequence_length`?",
        ),
        (
            GOOD.replace("path: books", "pth: books"),
            "/config.yaml:5: data.sources.0.path: missing; it must be given",
        ),
        (GOOD.replace("3e-4", '"3e-4"'), "/config.yaml:11: optimizer.learning_rate"),
        (GOOD.replace("3e-4", "-1"), "should be greater than 0"),
        (GOOD.replace("1e2", "yes"), '/config.yaml:9: train.steps = "yes": should be a valid int'),
        (GOOD + "serve: {r: 8}\n", "section `serve` has no keys in this version"),
        (GOOD.replace("1e2", "1\n  epochs: 2"), "exactly one of `steps`, `tokens`, `epochs`"),
        (GOOD.replace("preset: tiny", "preset: tiny\n  pretrained: x"), "/config.yaml:1: model: "),
        (GOOD + "schedule: {warmup: 3x}\n", 'should be a percentage such as "3%"'),
        (GOOD + "parallel: none\n", "/config.yaml:12: parallel"),
        (
            GOOD + "adapter: {kind: lora, targets: '.*(q_proj'}\n",
            '/config.yaml:12: adapter.targets = ".*(q_proj": no pattern of names: missing )',
        ),
        (GOOD + "train: {}\n", "/config.yaml:12: not valid YAML"),
        ("model: [", "/config.yaml:1: not valid YAML"),
        ("- a\n", "a config is a table of sections"),
        ("", "model: missing"),
        (
            GOOD.replace("type: text", "type: texts"),
            "data.sources.0: unknown type; known: alpaca, chat, completion, csv, dataset",
        ),
        (GOOD.replace("- type: text", "- kind: text"), "needs a `type`"),
    ],
)
def test_a_mistake_is_answered_with_line_key_value_and_advice(
    tmp_path: Path, text: str, said: str
) -> None:
    assert said in refusal(tmp_path, text)


def test_a_schedule_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    schedule = "schedule: {name: wsd, warmup: 50%, decay: 60%}\n"
    assert "together are longer than the run" in refusal(tmp_path, GOOD + schedule)
    assert "percentage" in refusal(tmp_path, GOOD + "schedule: {warmup: 300%}\n")


def test_a_model_from_scratch_needs_a_tokenizer(tmp_path: Path) -> None:
    assert "data.tokenizer.vocabulary" in refusal(
        tmp_path, GOOD.replace("  tokenizer: {vocabulary: 300}\n", "")
    )


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD.replace("3e-4", "x") + "seed: 3\n")
    assert "optimizer.learning_rate" in message
    assert "did you mean `run.seed`?" in message


def test_overrides_set_any_value(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    config = read_config(
        path,
        [
            "data.sources.0.path=plays",
            "data.sources.1.type=python_docs",
            "model.size.layers=3",
            "parallel.replicate=1",
            "train.steps=null",
            "train.epochs=2",
            "run.name=a=b".replace("=b", ""),
        ],
    )
    assert [source.type for source in config.data.sources] == ["text", "python_docs"]
    assert config.data.sources[0].path == "plays"  # type: ignore[union-attr]
    assert config.model.size.layers == 3
    assert config.train.steps is None
    assert config.train.epochs == 2


def test_a_wrong_override_is_named(tmp_path: Path) -> None:
    assert "--set train.stpes=3: train.stpes = 3: unknown key; did you mean `steps`?" in refusal(
        tmp_path, GOOD, "train.stpes=3"
    )
    assert "write --set section.key=value" in refusal(tmp_path, GOOD, "train.steps")
    assert "a list of 1" in refusal(tmp_path, GOOD, "data.sources.7={type: text}")
    assert "no 'x'" in refusal(tmp_path, GOOD, "data.sources.x.path=3")


def test_a_missing_or_undecodable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.yaml: cannot read"):
        read_config(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    with pytest.raises(RequestError, match=r"latin\.yaml: cannot read"):
        read_config(tmp_path / "latin.yaml")


def test_a_table_from_python_is_checked_the_same_way() -> None:
    with pytest.raises(RequestError, match="did you mean `train`"):
        config_from_dict({"trian": {}})


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GOOD))
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3
