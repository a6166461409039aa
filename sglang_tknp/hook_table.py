"""Every function of SGLang that this project hooks: why, and when the hook may go. A pure table."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One target of SGLang, wrapped by one function of ours."""

    target: str  # dotted path of a function or method
    kind: str  # "before", "after" or "around", as SGLang's HookType names them
    function: str  # "module:function" of ours, imported when the hook is installed
    params: tuple[str, ...]  # the parameters that the hook was written against
    reason: str
    delete_when: str


CLI_HOOKS = (
    Hook(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="after",
        function="sglang_tknp.hooks:after_add_cli_args",
        params=("parser",),
        reason="adds the --tknp flags; SGLang has no registry for flags",
        delete_when="SGLang lets a plugin register flags",
    ),
    Hook(
        target="sglang.srt.server_args.ServerArgs.from_cli_args",
        kind="after",
        function="sglang_tknp.hooks:after_from_cli_args",
        params=("cls", "args"),
        reason="reads the --tknp flags and switches TKNP on",
        delete_when="SGLang lets a plugin register flags",
    ),
)

CPU_HOOKS = (
    Hook(
        target="sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        kind="around",
        function="sglang_tknp.hooks:around_init_cpu_threads_env",
        params=("local_omp_cpuid", "dist_init_method"),
        reason="binds a rank's threads without SGLang's AMX build, whose operators PyPI lacks",
        delete_when="SGLang binds threads without sgl_kernel",
    ),
    Hook(
        target="sglang.srt.utils.common.get_available_gpu_memory",
        kind="around",
        function="sglang_tknp.hooks:around_get_available_gpu_memory",
        params=("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
        reason="on a CPU SGLang reads the machine's memory and never asks the platform",
        delete_when="the cpu branch asks current_platform",
    ),
)

LAUNCHER_HOOKS = (
    Hook(
        target="sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        kind="after",
        function="sglang_tknp.scheduler_ext.guard:after_launch_scheduler_processes",
        params=("cls", "server_args", "port_args", "run_scheduler_process_func"),
        reason="a killed rank must take the pool down at once and be named, at start too",
        delete_when="SGLang's watchdog names ranks and watches from the start",
    ),
    Hook(
        target=(
            "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler"
        ),
        kind="before",
        function="sglang_tknp.scheduler_ext.guard:before_sigquit",
        params=("self", "signum", "frame"),
        reason="tells a failure from an orderly stop, so that other hosts are not told farewell",
        delete_when="SGLang's launchers watch each other",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="before",
        function="sglang_tknp.scheduler_ext.info:before_validate_one_request",
        params=("self", "obj", "input_ids"),
        reason="refuses requests that bring embeddings, which TKNP's step does not carry",
        delete_when="the first node's root takes embeddings from their owner",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
        kind="around",
        function="sglang_tknp.scheduler_ext.forward:around_dispatch_to_scheduler",
        params=("self", "obj"),
        reason="a header in front of a request, so that the controller need not decode it",
        delete_when="permanent",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.init_request_dispatcher",
        kind="after",
        function="sglang_tknp.scheduler_ext.forward:after_init_request_dispatcher",
        params=("self",),
        reason="the tokenizer takes the controller's state for /server_info",
        delete_when="SGLang lets a plugin contribute to /server_info",
    ),
    Hook(
        target=(
            "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state"
        ),
        kind="around",
        function="sglang_tknp.scheduler_ext.forward:around_get_internal_state",
        params=("self",),
        reason="/server_info shows the ledger",
        delete_when="SGLang lets a plugin contribute to /server_info",
    ),
    Hook(
        target="sglang.srt.utils.watchdog.SubprocessWatchdog.stop",
        kind="before",
        function="sglang_tknp.scheduler_ext.guard:before_watchdog_stop",
        params=("self",),
        reason="SGLang stops its watchdog before it ends its processes; ours must stop with it",
        delete_when="SGLang's watchdog names ranks and watches from the start",
    ),
)

_WEIGHT_UPDATES = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
)

POOL_HOOKS = (
    *(
        Hook(
            target=_WEIGHT_UPDATES + method,
            kind="around",
            function="sglang_tknp.scheduler_ext.info:around_weight_update",
            params=("self", "recv_req"),
            reason="an update would miss the other nodes' blocks, so it is refused",
            delete_when="TKNP loads updates block by block",
        )
        for method in (
            "update_weights_from_disk",
            "update_weights_from_ipc",
            "begin_weight_update",  # opens every other kind of update
        )
    ),
    Hook(
        target="sglang.srt.utils.common.get_available_gpu_memory",
        kind="around",
        function="sglang_tknp.hooks:around_get_available_gpu_memory",
        params=("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
        reason="a node's KV capacity is its own: the minimum is over its ranks, not the pool's",
        delete_when="SGLang sizes attention-DP pools by node",
    ),
    Hook(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        kind="before",
        function="sglang_tknp.hooks:before_group_coordinator_init",
        params=("self", "group_ranks", "local_rank", "torch_distributed_backend"),
        reason="SGLang's gloo groups wait two hours for a lost rank",
        delete_when="--dist-timeout reaches the gloo groups",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.initialize",
        kind="before",
        function="sglang_tknp.model_ext.registry:before_initialize",
        params=("self",),
        reason="registers our models before SGLang first asks which class serves the checkpoint",
        delete_when="SGLang has these models, or lets a plugin name a package of models",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        kind="around",
        function="sglang_tknp.model_ext.stage:around_load_model",
        params=("self",),
        reason="builds and loads the node's layer block as a pipeline stage inside the node",
        delete_when="permanent",
    ),
    Hook(
        target=(
            "sglang.srt.model_executor.model_runner_components.layer_setup.resolve_layer_indices"
        ),
        kind="around",
        function="sglang_tknp.model_ext.stage:around_resolve_layer_indices",
        params=("model", "model_config", "is_draft_worker", "draft_model_idx"),
        reason="a node's KV pool holds all layers, although it computes only its block",
        delete_when="permanent",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._prepare_eager_forward_batch",
        kind="around",
        function="sglang_tknp.model_ext.step:around_prepare_eager_forward_batch",
        params=("self", "forward_batch"),
        reason="attention DP pads to equal rows; an ownership layout has exact rows",
        delete_when="permanent",
    ),
    Hook(
        target=(
            "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_cuda_graphs"
        ),
        kind="around",
        function="sglang_tknp.model_ext.graphs:around_capture_cuda_graphs",
        params=("model_runner",),
        reason="decode graphs of a pool are captured over ownership layouts",
        delete_when="SGLang lets a plugin name the decode graph runner of an in-tree platform",
    ),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info.ForwardMode.is_cpu_graph",
        kind="around",
        function="sglang_tknp.model_ext.graphs:around_is_cpu_graph",
        params=("self",),
        reason="--tknp-force-slots on a CPU: idle nodes too, as is_cuda_graph has it",
        delete_when="SGLang's CPU graphs know attention DP",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_idle_sleeper",
        kind="after",
        function="sglang_tknp.scheduler_ext.idle:after_init_idle_sleeper",
        params=("self",),
        reason="an idle pool sleeps, and one node's request wakes all nodes",
        delete_when="SGLang's attention DP can sleep when idle",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
        kind="before",
        function="sglang_tknp.scheduler_ext.idle:before_on_idle",
        params=("self",),
        reason="a node with waiting requests must not leave its peers asleep",
        delete_when="SGLang's attention DP can sleep when idle",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.__init__",
        kind="around",
        function="sglang_tknp.scheduler_ext.guard:around_scheduler_init",
        params=("self", "server_args", "port_args"),
        reason="names the rank that a failure stopped at start",
        delete_when="permanent",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.run_event_loop",
        kind="around",
        function="sglang_tknp.scheduler_ext.guard:around_run_event_loop",
        params=("self",),
        reason="arms the pool's time-outs, and names the rank that a failure stopped",
        delete_when="permanent",
    ),
    Hook(
        target=(
            "sglang.srt.managers.scheduler_components.internal_state."
            "SchedulerInternalStateController._add_topology"
        ),
        kind="after",
        function="sglang_tknp.scheduler_ext.info:after_add_topology",
        params=("self", "state"),
        reason="/server_info shows TKNP's layout",
        delete_when="SGLang lets a plugin contribute to /server_info",
    ),
    Hook(
        target="sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        kind="around",
        function="sglang_tknp.scheduler_ext.controller:around_event_loop",
        params=("self",),
        reason="places requests by the KV that owners can hold, and blocks instead of spinning",
        delete_when="permanent",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler._create_generation_req",
        kind="after",
        function="sglang_tknp.scheduler_ext.reports:after_create_generation_req",
        params=("self", "recv_req"),
        reason="an owner numbers the requests that it receives, for its reports",
        delete_when="SGLang's schedulers report requests to the controller",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output",
        kind="before",
        function="sglang_tknp.scheduler_ext.reports:before_send_output",
        params=("self", "output", "recv_obj"),
        reason="an owner reports the requests that end, when their clients are told",
        delete_when="SGLang's schedulers report requests to the controller",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
        kind="after",
        function="sglang_tknp.scheduler_ext.info:after_get_init_info",
        params=("self",),
        reason="SGLang takes the first node's token limits for all nodes",
        delete_when="SGLang's controller keeps limits by rank",
    ),
)
