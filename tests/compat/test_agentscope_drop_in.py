"""`tunesmith.compat.agentscope` has the names, signatures, fields and defaults of `agentscope.tuner` 1.0.21."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
import types

import pytest
from pydantic import BaseModel, ValidationError

import tunesmith.compat.agentscope as ours
from tunesmith.compat.agentscope import model_selection, prompt_tune
from tunesmith.compat.agentscope_config import translate_model
from tunesmith.config import ModelSection
from tunesmith.errors import ConfigError

PACKAGE = "agentscope.tuner"


@pytest.fixture(scope="module")
def theirs():
    """AgentScope's module. It imports DSPy for two base classes, which are replaced if DSPy is not installed."""
    pytest.importorskip("agentscope", reason="needs AgentScope, which the extra `agentscope` installs")
    patch = pytest.MonkeyPatch()
    if importlib.util.find_spec("dspy") is None:
        for name, names in {
            "dspy": ("Module", "Prediction"),
            "dspy.predict": (),
            "dspy.predict.predict": ("Predict",),
        }.items():
            fake = types.ModuleType(name)
            for each in names:
                setattr(fake, each, type(each, (), {}))
            patch.setitem(sys.modules, name, fake)
    before = {name for name in sys.modules if name.startswith(PACKAGE)}
    yield importlib.import_module(PACKAGE)
    for name in {name for name in sys.modules if name.startswith(PACKAGE)} - before:
        del sys.modules[name]
    patch.undo()


def test_every_name_is_there(theirs):
    assert sorted(ours.__all__) == sorted(theirs.__all__)
    assert all(hasattr(ours, name) for name in theirs.__all__)
    for module in (model_selection, prompt_tune):
        other = importlib.import_module(f"{PACKAGE}.{module.__name__.rpartition('.')[2]}")
        assert sorted(module.__all__) == sorted(other.__all__)


def list_functions(theirs):
    selection = importlib.import_module(f"{PACKAGE}.model_selection")
    functions = ("tune", "tune_prompt", "select_model", "check_workflow_function", "check_judge_function")
    judges = ("avg_time_judge", "avg_token_consumption_judge")
    return [(name, getattr(ours, name), getattr(theirs, name)) for name in functions] + [
        (name, getattr(model_selection, name), getattr(selection, name)) for name in judges
    ]


def test_functions_take_the_same_arguments_and_others_are_optional(theirs):
    for name, own, other in list_functions(theirs):
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(other), name
        own_parameters, parameters = inspect.signature(own).parameters, inspect.signature(other).parameters
        for each in parameters.values():
            assert own_parameters[each.name].kind is each.kind, (name, each.name)
            # `tune(config)` has every setting, so no argument of it is required
            assert own_parameters[each.name].default == each.default or name == "tune", (name, each.name)
        more = own_parameters.keys() - parameters.keys()
        assert all(own_parameters[each].default is not inspect.Parameter.empty for each in more), (name, more)


def test_classes_have_the_same_fields_and_defaults(theirs):
    names = [name for name in theirs.__all__ if inspect.isclass(getattr(theirs, name))]
    assert len(names) == 7
    for name in names:
        own, other = getattr(ours, name), getattr(theirs, name)
        assert issubclass(other, BaseModel) and issubclass(own, BaseModel)
        for field, info in other.model_fields.items():
            assert own.model_fields[field].is_required() == info.is_required(), (name, field)
            assert own.model_fields[field].default == info.default, (name, field)
        more = own.model_fields.keys() - other.model_fields.keys()
        assert not [field for field in more if own.model_fields[field].is_required()], name
        methods = {each for each in vars(other) if not each.startswith("_") and callable(getattr(other, each))}
        assert all(callable(getattr(own, each, None)) for each in methods - {"model_config"}), name


def test_settings_of_the_engine_are_the_same(theirs):
    given = {"model_path": "m", "max_model_len": 9, "inference_engine_num": 3, "tool_call_parser": "x"}
    assert ours.TunerModelConfig(**given).get_config() == theirs.TunerModelConfig(**given).get_config()
    assert ours.TinkerConfig(rank=3).get_config() == theirs.TinkerConfig(rank=3).get_config()


def test_messages_of_checks_of_signatures_begin_as_theirs(theirs):
    async def spread(task, *args):
        pass

    async def short(task):
        pass

    async def long(task, model, response, more):
        pass

    for name in ("check_workflow_function", "check_judge_function"):
        for func in (spread, short, long):
            with pytest.raises(ValueError) as error:
                getattr(theirs, name)(func)
            if "args" in str(error.value) or "Missing" in str(error.value):
                with pytest.raises(ValueError) as own:
                    getattr(ours, name)(func)
                assert str(own.value).startswith(str(error.value))


def test_the_import_needs_neither_torch_nor_dspy():
    program = (
        "import sys, tunesmith.compat.agentscope as tuner; assert 'tune_prompt' in dir(tuner); "
        "print(sorted({'torch', 'dspy', 'agentscope', 'opentelemetry'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_adapter_of_tinker_is_trained_here():
    def adapter(**fields):
        model = ours.TunerModelConfig(model_path="m", max_model_len=9, tinker_config=ours.TinkerConfig(**fields))
        return ModelSection(**translate_model(model)).lora

    assert (adapter().r, adapter().target_modules) == (16, "all-linear")
    assert (adapter(rank=4, seed=3, train_mlp=False).seed, adapter(train_mlp=False).target_modules) == (3, "attention")
    assert adapter(train_attn=False).target_modules == ("gate_proj", "up_proj", "down_proj")
    with pytest.raises(ConfigError, match=r"tinker_config.base_url='http://x' is not supported"):
        adapter(base_url="http://x")
    with pytest.raises(ConfigError, match="the head alone cannot be adapted"):
        adapter(train_attn=False, train_mlp=False)


def test_empty_names_of_a_data_set_are_none():
    dataset = ours.DatasetConfig(path="train.parquet", name="", split="")
    assert (dataset.name, dataset.split) == (None, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimization_level": None}, "needs num_candidates and num_trials"),
        ({"num_trials": 3}, "no effect with optimization_level='light'"),
        ({"lm_api_key_env": "KEY"}, "no effect without lm_base_url"),
        ({"optimisation_level": "heavy"}, "optimisation_level"),
    ],
)
def test_settings_of_prompt_tuning_that_have_no_effect_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        ours.PromptTuneConfig(**fields)
