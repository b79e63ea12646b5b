"""The one table of commands: the command line, pipeline stages, `config --options` and the reference pages read it.

An entry names its functions and config classes as `module:attribute`. They are imported when they are used, so help
texts and errors in config files come without torch, and an entry may name functions of packages on higher layers.

A command of the command line does the same in every case (`tunesmith.cli`): read the options, load and check the
settings, print the first line, call `run`, print the result. A stage of a pipeline is checked by `check` before the
first stage runs, and run by `stage` (`tunesmith.commands.run`). A new command or stage is an entry here and its module:

    Command(
        name="count",
        help="Count the rows of a file.",
        options=(argument("path", "File to read."),),
        run="tunesmith.commands.count:count_rows",     # count_rows(path=...), whose result is printed
    )
    Command(
        name="shuffle",
        config="tunesmith.commands.shuffle:ShuffleSection",
        kind="shuffle",
        stage_config="tunesmith.commands.shuffle:ShuffleStage",    # the same with `kind: Literal["shuffle"]`
        # run_stage(settings, out_dir=..., choose_model=...), and check_stage(settings) beside it
        stage="tunesmith.commands.shuffle:run_stage",
    )
"""

from __future__ import annotations

import importlib
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

REQUIRED: Any = object()
"""The default of options that must be given."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line, or an argument."""

    name: str
    """Parameter of the command's function."""
    help: str
    _: KW_ONLY
    type: type = str
    """str, int, float, bool for a flag, or list for a text that may be repeated."""
    default: Any = None
    flag: str | None = None
    """How it is written, where that is not the name."""
    is_argument: bool = False
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    key: str | None = None
    """Key of the settings that it overrides; it is no argument of the command's function then."""
    also: tuple[str, ...] = ()
    """Further overrides (`key=value`) that it implies."""
    read: str | None = None
    """Function that turns the given value into the argument or the value of the key."""
    is_quiet: bool = False
    """Whether the command prints no first line with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the command line, a stage of pipelines, or both."""

    name: str
    """As it is written; `search build` is a command of a group."""
    help: str = ""
    options: tuple[Option, ...] = ()
    """In the order of the help text. `config` is the settings' file, `overrides`, `gpus` and `as_json` mean the same
    for every command; options with a key change the settings, others are given to `run`."""
    run: str | None = None
    """The work: called with the settings, if there are any, and the options that were given; its result is printed as
    Python prints it. None for stages that are not on the command line."""
    config: str | None = None
    """Class of the settings; its knobs are listed by `tunesmith config --options`."""
    takes: tuple[str, ...] = ()
    """Classes of settings that the Python function takes, if not `config` alone."""
    load: str | None = None
    """Reads the file, given its path and overrides, if not as a file of `config` or of Trinity-RFT."""
    plan: str | None = None
    """Called with settings and options before the first line, in place of the check of all paths in the settings:
    raises for options that do not fit the settings, and returns the `{plan}` of the first line."""
    first_line: str | None = None
    """Printed on stderr before slow libraries are imported; may name `config` (the path), `settings`, `plan` and
    options."""
    has_ranks: bool = False
    """Whether it may run on several ranks."""
    finds_models: bool = True
    """Whether `model.path` must be a model before libraries are imported; evaluations also accept run folders."""

    kind: str | None = None
    """Kind of the stage in pipeline files; None if it cannot be a stage."""
    stage_config: str | None = None
    """Class of the stage's settings: those of `config`, if any, and `kind`."""
    stage: str | None = None
    """Runs it as a stage: called with settings, `out_dir` and `choose_model`, returns a `StageResult`."""
    check: str | None = None
    """Raises for settings that cannot run, before the first stage starts; references to stages are unresolved. None:
    `check_stage` in the module of `stage`."""
    has_model: bool = False
    """Whether `stage:NAME` is a model."""
    output: str | None = None
    """What shows that the output of a finished stage is whole: `model` or `folder`, whose DONE.json lists its files, or
    the name of a JSON file that it wrote."""
    mutable_keys: str | None = None
    """Keys that may change when an unfinished stage is resumed; None if all settings must be the same."""
    figures: str | None = None
    """Further figures for the report, from the settings and the command's own result."""
    report: str | None = None
    """Lines of the report on several stages of this kind, from the pipeline's folder and their figures."""


def argument(name: str, help: str, **details: Any) -> Option:  # noqa: A002  # the name of the field
    """An argument that must be given."""
    return Option(name, help, default=REQUIRED, is_argument=True, **details)


RUN_FILE = argument("config", "Run file (YAML). List its keys with: tunesmith config --options.")
WORKFLOW = Option(
    "workflow", "Workflow (the agent), as module:function or file.py:function. Overrides the file.", key="workflow"
)
JUDGE = Option("judge", "Judge, in the same form. Without a judge the workflow returns the reward.", key="judge")
ENVIRONMENT = Option(
    "environment",
    "Environment with tasks, such as reasoning_gym:countdown (tunesmith environments list). Overrides the file.",
    key="environment",
)
AGENT = (WORKFLOW, JUDGE, ENVIRONMENT)
OVERRIDES = Option(
    "overrides",
    "Override a key of the file, e.g. --set section.key=3. Repeatable.",
    type=list,
    flag="--set",
    metavar="KEY=VALUE",
)
RESUME = Option("resume", "Resume from the last checkpoint of this run.", type=bool, key="continue_from_checkpoint")
GPUS = Option("gpus", "Train on this many GPUs of this host.", type=int, minimum=1, key="cluster.num_workers")
RANKS = Option("ranks", "Train on this many processes, also on CPUs.", type=int, minimum=1, key="cluster.num_workers")
JSON = Option("as_json", "Print the result as JSON.", type=bool, flag="--json")
DEBUG = Option("debug", "Print tracebacks of errors and of failed rollouts.", type=bool)
"""An option of every command, after its own."""
RESUMABLE_OUT = Option("out", "Output folder; an unfinished run in it is resumed.", default=REQUIRED)
FORMATS = (
    "et_pool, et_evolve, et_rft, et_rollouts, et_pareto, et_rl, et_test (files of ET-Agent's code), tasks, "
    "transcripts or conversations (JSON lines of Tunesmith)."
)
ENVIRONMENT_TASK = (
    argument("name", "Environment, such as reasoning_gym:countdown or file.py:Class."),
    Option("seed", "Seed of the task.", type=int, default=0, minimum=0),
    Option("args", "Arguments as a JSON object.", read="tunesmith.commands.settings:read_arguments"),
)
LOADING = "{config} is valid, loading libraries"
SEARCH_KNOB = replace(OVERRIDES, help="Another knob of docs/retrieval.md, e.g. --set key=3. Repeatable.")

SFT = Command(
    name="sft",
    help="Fine-tune a model on conversations: all weights, or a LoRA or QLoRA adapter.",
    options=(
        replace(RUN_FILE, help="Fine-tuning file (YAML). Keys: config --options --stage sft."),
        RESUMABLE_OUT,
        OVERRIDES,
    ),
    run="tunesmith.api:sft",
    config="tunesmith.config:SftConfig",
    first_line=LOADING,
    kind="sft",
    stage_config="tunesmith.config:SftStage",
    stage="tunesmith.commands.sft.train:run_stage",
    has_model=True,
    output="model",
    mutable_keys="tunesmith.commands.sft.train:MUTABLE_KEYS",
)
COMMANDS: tuple[Command, ...] = (
    Command(
        name="tune",
        help="Train the model inside an agent with reinforcement learning, as configured in a run file.",
        options=(
            RUN_FILE,
            *AGENT,
            OVERRIDES,
            RESUME,
            Option(
                "resume_from",
                "Resume from this step, 0: start over. Moves later steps aside.",
                type=int,
                minimum=0,
                metavar="STEP",
                key="resume_from_step",
                also=("continue_from_checkpoint=true",),
            ),
            GPUS,
            RANKS,
        ),
        run="tunesmith.api:tune",
        config="tunesmith.config:RunConfig",
        first_line=LOADING,
        has_ranks=True,
        kind="rl",
        stage_config="tunesmith.config:RlStage",
        stage="tunesmith.commands.tune.tune:run_stage",
        has_model=True,
        output="model",
        mutable_keys="tunesmith.runs.run_folder:MUTABLE_KEYS",
    ),
    Command(
        name="serve",
        help="Train agents that run as programs of their own: they take tasks over HTTP, call the model and post "
        "rewards.",
        options=(
            RUN_FILE,
            replace(JUDGE, help="Judge, as module:function or file.py:function; without one, workers post rewards."),
            replace(OVERRIDES, help="Override a key of the file, e.g. serve.port=0. Repeatable."),
            RESUME,
            GPUS,
            RANKS,
        ),
        run="tunesmith.api:serve",
        config="tunesmith.config:RunConfig",
        first_line=LOADING,
        has_ranks=True,
    ),
    SFT,
    replace(
        SFT,
        name="prefer",
        help="Train a model on preferences: pairs of completions (DPO, ORPO, SimPO), or completions with a label "
        "(KTO).",
        options=(
            replace(RUN_FILE, help="Preference file (YAML). Keys: config --options --stage prefer."),
            RESUMABLE_OUT,
            OVERRIDES,
        ),
        run="tunesmith.api:prefer",
        config="tunesmith.config:PreferenceConfig",
        kind="prefer",
        stage_config="tunesmith.config:PreferStage",
    ),
    Command(
        name="prepare",
        help="Convert questions with worked solutions, such as GSM8K, to conversations of an agent with a calculator.",
        options=(
            Option("config", "Preparation file (YAML). Keys: docs/prepare.md.", is_argument=True),
            Option("out", "New output folder.", default="data/prepared"),
            Option("data", "Training questions: folder, file or Hugging Face data set.", key="data.path"),
            Option("data_name", "Configuration of --data; main for openai/gsm8k.", key="data.name"),
            Option("eval_data", "Held-out questions: data set (split test) or file.", key="eval_data.path"),
            Option("eval_name", "Configuration of --eval-data.", key="eval_data.name"),
            Option("style", "Which calculations become tool calls: all or last.", key="style"),
            Option(
                "paraphrase",
                "Add paraphrased questions written by this model.",
                metavar="BASE_URL/MODEL",
                key="paraphrase",
                read="tunesmith.commands.settings:parse_server_url",
            ),
            Option(
                "pass_rate",
                "Add a column with the pass rate of this model. Repeatable.",
                type=list,
                metavar="[NAME=]MODEL",
                key="pass_rate.models",
                read="tunesmith.commands.settings:parse_model_names",
            ),
            Option("samples", "Rollouts per question for pass rates.", type=int, key="pass_rate.num_samples"),
            Option("max_rows", "Read only the first N rows, for a quick test.", type=int, key="max_rows"),
            OVERRIDES,
        ),
        run="tunesmith.api:prepare",
        config="tunesmith.config:PrepareSection",
        first_line="loading libraries and {settings.data.path}",
        kind="prepare",
        stage_config="tunesmith.config:PrepareStage",
        stage="tunesmith.commands.prepare.run:run_stage",
        output="folder",
    ),
    Command(
        name="collect",
        help="Collect conversations of the workflow that the judge accepts, by the model itself or by a teacher, as "
        "rows for sft.",
        options=(
            RUN_FILE,
            Option("out", "JSON lines file to write.", default=REQUIRED),
            Option(
                "teacher",
                "Model of a server that the workflow calls in place of model.path.",
                metavar="BASE_URL/MODEL",
                key="teacher",
                read="tunesmith.commands.settings:read_teacher",
            ),
            Option("num_runs", "Rollouts per task.", type=int, flag="--runs", minimum=1, key="num_runs"),
            Option("min_reward", "Least reward of a rollout that is kept; 1 by default.", type=float, key="min_reward"),
            Option("model", "Model folder or hub id; default: model.path.", key="model.path"),
            *AGENT,
            OVERRIDES,
        ),
        run="tunesmith.api:collect_conversations",
        config="tunesmith.config:CollectConfig",
        first_line=LOADING,
        kind="collect",
        stage_config="tunesmith.config:CollectStage",
        stage="tunesmith.commands.collect.run:run_stage",
        check="tunesmith.commands.tune.tune:check_stage",
    ),
    Command(
        name="pass-rate",
        help="Write the training tasks with the pass rate of the model, the prior of difficulty_based task selectors.",
        options=(
            RUN_FILE,
            Option("field", "Name of the new field, e.g. qwen3_0.6b_pass_rate.", default=REQUIRED),
            Option("out", "JSON lines file to write.", default=REQUIRED),
            Option("num_runs", "Rollouts per task.", type=int, default=8, flag="--runs", minimum=1),
            Option(
                "tool_keys",
                "Metric that counts tool calls; also writes the numbers of each rollout. Repeatable.",
                type=list,
                flag="--tool-key",
            ),
            Option("model", "Model folder or hub id; default: model.path.", key="model.path"),
            *AGENT,
            OVERRIDES,
        ),
        run="tunesmith.api:measure_pass_rates",
        config="tunesmith.config:PassRateConfig",
        takes=("tunesmith.config:RunConfig",),
        first_line=LOADING,
        kind="pass_rate",
        stage_config="tunesmith.config:PassRateStage",
        stage="tunesmith.commands.pass_rate:run_stage",
        check="tunesmith.commands.tune.tune:check_stage",
    ),
    Command(
        name="eval",
        help="Compare models on the held-out tasks of a run file, with confidence intervals and paired tests.",
        options=(
            RUN_FILE,
            Option(
                "models",
                "Model folder, hub id or run folder to evaluate. Repeatable.",
                type=list,
                flag="--model",
                metavar="[LABEL=]PATH",
                read="tunesmith.commands.settings:collect_models",
            ),
            *AGENT,
            Option(
                "samples",
                "Rollouts per task; above 1, pass@k is reported.",
                type=int,
                minimum=1,
                key="evaluation.num_samples",
            ),
            Option(
                "temperature", "Sampling temperature; 0 is greedy.", type=float, minimum=0, key="evaluation.temperature"
            ),
            Option("seed", "Seed of all sampled tokens.", type=int, minimum=0, key="seed"),
            OVERRIDES,
            Option("out", "Folder for comparison.json (with every rollout) and comparison.md."),
            Option("has_plot", "Also draw comparison.png; needs the extra `plot`.", type=bool, flag="--plot"),
            Option("suite", "Measures instead of a judge, for agents with tools: tir, or tir_paper."),
        ),
        run="tunesmith.api:evaluate",
        config="tunesmith.config:EvalConfig",
        takes=("tunesmith.config:RunConfig", "tunesmith.config:EvalConfig"),
        load="tunesmith.commands.settings:load_eval_file",
        first_line=LOADING,
        finds_models=False,
        kind="eval",
        stage_config="tunesmith.config:EvalStage",
        stage="tunesmith.commands.eval.compare:run_stage",
        output="comparison.json",
        figures="tunesmith.et_agent.radar:describe_behavior",
        report="tunesmith.et_agent.radar:format_section",
    ),
    Command(
        name="run",
        help="Run the stages of a pipeline file (prepare, sft, prefer, rl, eval, export); stages that are done are "
        "skipped.",
        options=(
            replace(RUN_FILE, help="Pipeline file (YAML). Keys: docs/pipeline.md."),
            Option("only", "Run only this stage."),
            Option("start_from", "Run this stage and all later ones.", flag="--from"),
            Option("is_rerun", "Rerun stages that are done; old outputs are moved aside.", type=bool, flag="--again"),
            Option(
                "is_check",
                "Validate everything, list what would run, and stop.",
                type=bool,
                flag="--check",
                is_quiet=True,
            ),
            OVERRIDES,
        ),
        run="tunesmith.commands.run.run:run_command",
        config="tunesmith.commands.run.config:PipelineConfig",
        load="tunesmith.commands.run.config:load_pipeline",
        plan="tunesmith.commands.run.config:name_selected",
        first_line="{config} is valid, loading libraries for {plan}",
    ),
    Command(
        name="check",
        help="Run a workflow on one task and show its tokens, masks, reward and problems.",
        options=(
            argument("target", "Workflow: file.py (its `workflow`), file.py:function, module:function; or a run file."),
            Option(
                "task",
                "Row of the data set, from 0, or the task itself as a JSON object.",
                default="0",
                read="tunesmith.commands.settings:read_task",
            ),
            Option("model", "Model: folder or hub id. Overrides the file."),
            Option("judge", "Judge, as file.py:function. Overrides the file."),
            Option("data", "Data set of the task: folder, file or hub id."),
            replace(OVERRIDES, help="Override a key of a run file. Repeatable."),
            JSON,
        ),
        run="tunesmith.commands.check.run:check",
        first_line="loading libraries for {target}",
    ),
    Command(
        name="doctor",
        help="Say what is wrong with a run and what to change, from the files in its folder; or, before it starts, "
        "whether it fits the GPU.",
        options=(
            Option("run", "Folder of a run: finished, stopped or running.", is_argument=True),
            Option("plan", "Run file (YAML), or a model: list the memory that its training takes.", metavar="FILE"),
            Option(
                "memory_gib",
                "Memory of the GPU that --plan is for; default: the device of this machine.",
                type=float,
                flag="--memory",
                metavar="GIB",
                minimum=1,
            ),
            replace(OVERRIDES, help="Override a key of the file of --plan. Repeatable."),
            replace(JSON, help="Print the diagnosis as JSON."),
        ),
        run="tunesmith.commands.doctor.diagnose:diagnose",
    ),
    Command(
        name="view",
        help="Show runs in a local web page: curves, rollouts, tokens, failures and evaluations, side by side.",
        options=(
            argument(
                "runs",
                "Folders of runs, finished or running, of `tunesmith eval`, or above such folders.",
                type=list,
                metavar="RUN...",
            ),
            Option("port", "Port on 127.0.0.1; 0 takes a free one.", type=int, default=7860, minimum=0, maximum=65535),
            Option("no_browser", "Only print the address.", type=bool),
            Option("export", "Write one self-contained file instead of serving.", metavar="FILE.html"),
            Option(
                "max_mb", "Largest size of that file; it says what it leaves out.", type=float, default=20.0, minimum=1
            ),
        ),
        run="tunesmith.viewer.command:view",
    ),
    Command(
        name="show",
        help="Print rollouts of a step: conversations, rewards, and failures with their tracebacks.",
        options=(
            argument("run", "Folder of a run, or above one."),
            Option("step", "Step to show; default: the newest with rollouts.", type=int, minimum=0),
            Option("task", "Only tasks whose id contains this."),
            Option("min_reward", "Only rollouts with at least this reward.", type=float),
            Option("max_reward", "Only rollouts with at most this reward.", type=float),
            Option("is_failed", "Only failed rollouts, with their tracebacks.", type=bool, flag="--failed"),
            Option("limit", "Largest number of rollouts to print.", type=int, default=10, minimum=1),
        ),
        run="tunesmith.viewer.command:show",
    ),
    Command(
        name="export",
        help="Export a model as a Hugging Face folder, PEFT adapter or GGUF files, and verify each against the source.",
        options=(
            argument("model", "Folder of a model, adapter or run (its last checkpoint), or hub id.", key="path"),
            Option("out", "New output folder.", default=REQUIRED),
            Option(
                "formats",
                "Format: hf (default), adapter or gguf. Repeatable.",
                type=list,
                flag="--format",
                key="formats",
            ),
            Option(
                "gguf_types",
                "GGUF type: f32, f16 (default), q8_0 or q4_k_m. Repeatable.",
                type=list,
                flag="--gguf-type",
                key="gguf_types",
            ),
            Option("name", "Model name, for the model card and the GGUF files.", key="name"),
            Option("push", "Upload hf, or else adapter, to the hub; private.", metavar="OWNER/NAME"),
            Option("is_public", "Let everybody read what --push uploads.", type=bool, flag="--public"),
            replace(OVERRIDES, help="Override an export setting, e.g. --set license=mit."),
        ),
        run="tunesmith.api:export",
        config="tunesmith.config:ExportSection",
        first_line="loading libraries and {settings.path}",
        kind="export",
        stage_config="tunesmith.config:ExportStage",
        stage="tunesmith.commands.export.run:run_stage",
        check="tunesmith.commands.export.gguf.files:check_packages",
        has_model=True,
        output="folder",
    ),
    Command(
        name="convert",
        help="Convert files of ET-Agent's code to rows of tasks, transcripts or conversations, and back.",
        options=(
            argument("path", "File to read."),
            Option("source", f"Format of the file: {FORMATS}", default=REQUIRED, flag="--from", metavar="FORMAT"),
            Option("target", "Format to write, one of the same.", default=REQUIRED, flag="--to", metavar="FORMAT"),
            Option("out", "File to write; an existing file is an error.", default=REQUIRED),
        ),
        run="tunesmith.et_agent.formats.convert:convert_file",
    ),
    Command(
        name="config",
        help="Print the resolved configuration of a file, its JSON schema, its keys, or the algorithms.",
        options=(
            Option("config", "File (YAML) to resolve.", is_argument=True),
            OVERRIDES,
            Option("stage", "Kind of file: tune, sft, prefer, prepare, collect, pass_rate, eval, ...", default="tune"),
            Option("schema", "Print the JSON schema of the file.", type=bool),
            Option("options", "List every key: type, default and when to change it.", type=bool),
            Option("algorithms", "List the algorithms and their arguments.", type=bool),
        ),
        run="tunesmith.commands.settings:describe",
    ),
    Command(
        name="model prepare",
        help="Write a Hugging Face model folder without the hub: from an installed package, or with random weights.",
        options=(
            argument("name", "Model: smollm2-135m-instruct, pocket or pocket-gguf."),
            Option("out_dir", "Output folder; default: models/NAME.", flag="--out"),
        ),
        run="tunesmith.model.prepare:prepare_model",
    ),
    Command(
        name="environments list",
        help="List the families of environments that a file can name, or the names of one.",
        options=(Option("family", "Family, such as reasoning_gym.", is_argument=True),),
        run="tunesmith.commands.environments:list_environments",
    ),
    Command(
        name="environments show",
        help="Show an environment: its arguments, its prompts, and the first message of a task.",
        options=ENVIRONMENT_TASK,
        run="tunesmith.commands.environments:show_environment",
    ),
    Command(
        name="environments play",
        help="Play an episode with a model, whose tokens and reward are shown, or without one by replies of your own.",
        options=(
            *ENVIRONMENT_TASK,
            Option("model", "Model: folder or hub id. Without one, each line that you type is a reply."),
            replace(OVERRIDES, help="Override a key of the run of --model, e.g. model.max_tokens=256. Repeatable."),
        ),
        run="tunesmith.commands.environments:play_environment",
    ),
    Command(
        name="model convert",
        help="Convert a GGUF file to a Hugging Face model folder, which can be trained, and verify it.",
        options=(
            argument("path", "The .gguf file."),
            Option("out_dir", "New output folder.", default=REQUIRED, flag="--out"),
            Option("dtype", "Data type of the weights: float32 or bfloat16.", default="float32"),
            Option("chat_template", "Jinja file, for a file without a chat template."),
        ),
        run="tunesmith.commands.export.convert:convert_gguf",
        first_line="loading libraries",
    ),
    Command(
        name="demo",
        help="Fine-tune a tiny model, train it by RL in a ReAct agent with a calculator, and compare: minutes on a "
        "CPU.",
        options=(
            Option("seed", "Seed of the tasks, the initial weights and all sampled tokens.", type=int, default=0),
            Option("out", "Parent folder of the demo's output folder.", default="checkpoints/demo"),
        ),
        run="tunesmith.commands.demo.run:run_command",
        first_line="loading libraries",
    ),
    Command(
        name="search build",
        help="Build a search index over passages: BM25, dense vectors, or both.",
        options=(
            argument("corpus", "Passages: JSON Lines file, folder of text files, or Hugging Face data set."),
            Option("out", "New folder for the index.", default=REQUIRED),
            Option("kind", "bm25 (default), dense, or hybrid.", key="kind"),
            Option("model", "Embedding model of dense and hybrid: folder or hub id.", key="model"),
            Option("chunk_words", "Split texts into passages of this many words.", type=int, key="chunk_words"),
            Option("name", "Configuration of a Hugging Face data set."),
            Option("split", "Split of a Hugging Face data set; train by default."),
            SEARCH_KNOB,
        ),
        run="tunesmith.retrieval.server:build",
        config="tunesmith.retrieval.settings:IndexSettings",
        first_line="reading {corpus}",
    ),
    Command(
        name="search serve",
        help="Serve an index over HTTP until it is interrupted: /health, /search, /batch_search.",
        options=(
            argument("index", "Folder of an index."),
            Option("host", "Address to listen on; 127.0.0.1 by default.", key="host"),
            Option("port", "Port; 1243 by default, 0 picks a free one.", type=int, key="port"),
            Option("api_key", "Key that requests must carry; better set TUNESMITH_SEARCH_API_KEY.", key="api_key"),
            SEARCH_KNOB,
        ),
        run="tunesmith.retrieval.server:serve",
        config="tunesmith.retrieval.settings:ServerSettings",
    ),
    Command(
        name="pareto",
        config="tunesmith.config:ParetoSection",
        kind="pareto",
        stage_config="tunesmith.config:ParetoStage",
        stage="tunesmith.et_agent.selection.pareto:run_stage",
    ),
    Command(
        name="rft_filter",
        config="tunesmith.config:RftFilterSection",
        kind="rft_filter",
        stage_config="tunesmith.config:RftFilterStage",
        stage="tunesmith.et_agent.selection.rft:run_stage",
    ),
    Command(
        name="flywheel",
        config="tunesmith.config:FlywheelConfig",
        kind="flywheel",
        stage_config="tunesmith.config:FlywheelStage",
        stage="tunesmith.et_agent.flywheel.run:run_stage",
    ),
    Command(
        name="function",
        kind="function",
        stage_config="tunesmith.config:FunctionStage",
        stage="tunesmith.commands.run.run:run_function",
        check="tunesmith.commands.run.run:check_function",
    ),
)
GROUPS = {
    "environments": "Environments with tasks, by name.",
    "model": "Prepare models.",
    "search": "Search over passages, for agents.",
}
"""Help texts of the groups of commands."""
STAGES = {command.kind: command for command in COMMANDS if command.kind is not None}
"""The entry of each kind of stage."""


def find_command(name: str) -> Command:
    """The entry of that name."""
    return next(command for command in COMMANDS if command.name == name)


def import_named(reference: str) -> Any:
    """The function, class or constant that an entry names as `module:attribute`."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def list_config_classes() -> dict[str, Any]:
    """Name of a kind of file, as in `tunesmith config --stage` -> its config class; `serve` reads files of `tune`."""
    classes: dict[str, Any] = {}
    for command in COMMANDS:
        is_file = command.kind is not None or any(option.name == "config" for option in command.options)
        if is_file and command.config is not None and (found := import_named(command.config)) not in classes.values():
            classes[command.name.replace("-", "_")] = found
    return classes
