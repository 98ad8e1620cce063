"""Engines of quantised weights follow a trainer, with the configurations that the page shows."""

import ast
import json
import re
from pathlib import Path

import pytest
from rollouts import running_engine

from torch_ros.integrations.vllm import attach

PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "low_precision.md"
SHOWN = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)]
CONFIGS = {config["format"]: config for config in SHOWN}

NAMES, KEEP = ast.literal_eval(
    re.search(r"^names, keep = (.*)$", PAGE.read_text(), re.MULTILINE)[1]
)
SCALES = "model.layers.1.self_attn.o_proj.weight_scale"


@pytest.mark.parametrize(
    ("kind", "form"), [("mxfp8", "mxfp8-quantized"), ("nvfp4", "nvfp4-pack-quantized")]
)
def test_it_answers_as_a_model_of_the_rounded_weights(tiny, train, etcd_endpoint, kind, form):
    config = CONFIGS[form]
    with running_engine(tiny("moe"), hf_overrides={"quantization_config": config}) as engine:
        trainer = train(engine.path, kind)
        with attach(engine.llm, model=kind, options={"endpoint": etcd_endpoint}) as policy:
            for version in (1, 2):
                how = {kind: [NAMES, KEEP], "names": "checkpoint"}
                published = trainer.publish(version, **how)
                assert policy.update()
                engine.agrees(published)
            (report,) = engine.reports()
            assert SCALES in report.staged
