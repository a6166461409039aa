"""Proves that the installed SGLang is the one this version was written against.

Every hook target has the parameters we know and accepts our function, every resolution step and
refused setting exists with the stock value we name, and a target that changed stops the process.
"""

import argparse
import importlib.metadata
import inspect
import pkgutil
from dataclasses import replace
from typing import Any

import pytest

from sglang_tknp import compat, resolution
from sglang_tknp.compat import Hook, IncompatibleSglangError
from sglang_tknp.plugin import fail_closed
from sglang_tknp.refusals import REFUSALS, Refusal, refused

pytestmark = [pytest.mark.upstream, pytest.mark.filterwarnings("ignore")]

HOOKS = (*compat.CLI_HOOKS, *compat.CPU_HOOKS, *compat.LAUNCHER_HOOKS, *compat.POOL_HOOKS)
SOME_HOOK = compat.CLI_HOOKS[0]


def hook_name(hook: Hook) -> str:
    return f"{hook.kind}-{'.'.join(hook.target.split('.')[-2:])}"


def target_of(hook: Hook) -> Any:
    owner, _, name = hook.target.rpartition(".")
    found = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    return inspect.unwrap(getattr(found, "__func__", found))


@pytest.fixture(scope="module")
def stock_args() -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="unused")


@pytest.fixture(scope="module")
def stock_flags() -> set[str]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return set(parser._option_string_actions)


@pytest.fixture
def registered() -> Any:
    """SGLang's hook registry, which must come out of a test as it went in."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: list(hooks) for target, hooks in HookRegistry._hooks.items()}
    yield HookRegistry
    assert {target: list(hooks) for target, hooks in HookRegistry._hooks.items()} == before


@pytest.mark.parametrize("hook", HOOKS, ids=hook_name)
def test_a_hooks_target_has_the_known_signature(hook: Hook) -> None:
    compat.check_signature(hook)


@pytest.mark.parametrize("hook", HOOKS, ids=hook_name)
def test_a_hook_accepts_what_its_target_is_called_with(hook: Hook) -> None:
    """Keyword-only parameters arrive by keyword, all others may arrive by position."""
    function = compat.resolve(hook.function)
    assert function.__module__.startswith("sglang_tknp.")
    args: list[object] = [] if hook.kind == "before" else [object()]  # the original, or its result
    kwargs = {}
    for name, parameter in inspect.signature(target_of(hook)).parameters.items():
        if parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = object()
        else:
            args.append(object())
    inspect.signature(function).bind(*args, **kwargs)


def test_hooks_say_why_and_until_when() -> None:
    for hook in HOOKS:
        assert hook.kind in ("before", "after", "around")
        assert len(hook.reason.split()) > 3
        assert hook.delete_when
    # Late hooks on a patched target are dropped by SGLang: one hook of ours for each target.
    functions: dict[str, str] = {}
    for hook in HOOKS:
        assert functions.setdefault(hook.target, hook.function) == hook.function


def test_resolution_steps_exist() -> None:
    from sglang.srt.arg_groups import resolution_hooks

    assert set(resolution.STEPS) <= resolution_hooks._OVERRIDABLE_HOOKS


def test_an_unknown_resolution_step_is_refused_by_sglang() -> None:
    with pytest.raises(ValueError, match="no_such_step"):
        compat.register_resolution_hooks({"no_such_step": lambda args, previous: None})


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_a_refused_setting_exists_and_its_default_is_served(
    refusal: Refusal, stock_args: Any, stock_flags: set[str]
) -> None:
    default = getattr(stock_args, refusal.field)  # AttributeError: SGLang renamed the setting
    assert default is None or default in refusal.stock
    assert refusal.flag in stock_flags


def test_stock_arguments_are_not_refused(stock_args: Any) -> None:
    assert refused(stock_args) is None


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.server_args.ServerArgs.no_such_method",
        "sglang.srt.server_args.NoSuchClass.add_cli_args",
        "sglang.srt.no_such_module.function",
    ],
)
def test_a_missing_target_is_named(target: str, registered: Any) -> None:
    with pytest.raises(IncompatibleSglangError, match=f"^{target} is gone "):
        compat.install([replace(SOME_HOOK, target=target)])
    assert target not in registered._patched


@pytest.mark.parametrize("params", [("self", "parser"), ("parser", "more"), ("args",)])
def test_a_changed_signature_is_named(params: tuple[str, ...]) -> None:
    with pytest.raises(IncompatibleSglangError) as caught:
        compat.check_signature(replace(SOME_HOOK, params=params))
    assert str(caught.value) == (
        f"{SOME_HOOK.target} takes ('parser',), expected it to start with {params}"
    )


def test_a_target_that_sglang_changes_is_caught_before_it_is_patched(
    monkeypatch: pytest.MonkeyPatch, registered: Any
) -> None:
    from sglang.srt.utils import watchdog

    def stop(self: Any, timeout: float) -> None: ...

    hook = replace(compat.LAUNCHER_HOOKS[-1], params=("self", "reason"))
    monkeypatch.setattr(watchdog.SubprocessWatchdog, "stop", stop)
    with pytest.raises(IncompatibleSglangError, match=r"SubprocessWatchdog.stop takes \('self', "):
        compat.install([hook])
    assert watchdog.SubprocessWatchdog.stop is stop
    assert hook.target not in registered._patched


def test_a_hook_that_sglang_does_not_apply_is_named(
    monkeypatch: pytest.MonkeyPatch, registered: Any
) -> None:
    """SGLang only logs a hook that it fails to apply."""
    hook = compat.LAUNCHER_HOOKS[-1]
    monkeypatch.setattr(registered, "register", lambda *_: None)
    with pytest.raises(IncompatibleSglangError, match=f"did not apply the hooks on {hook.target}$"):
        compat.install([hook])


def test_a_broken_hook_ends_the_process_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(SOME_HOOK, target="sglang.srt.server_args.ServerArgs.no_such_method")
    with pytest.raises(SystemExit) as stopped:
        fail_closed(compat.install, [broken])
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "sglang-tknp: cannot start: IncompatibleSglangError: "
        "sglang.srt.server_args.ServerArgs.no_such_method is gone ("
    )


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23rc1", "0.5.230"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(IncompatibleSglangError) as caught:
        compat.check_versions()
    assert str(caught.value) == (
        f"sglang {version} is installed; this sglang-tknp supports 0.5.23: "
        "pip install sglang==0.5.23"
    )


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cpu"])
def test_the_supported_version_is_served(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    compat.check_versions()


def test_the_installed_version_is_supported() -> None:
    compat.check_versions()


def test_a_target_that_another_plugin_has_hooked_is_refused(
    monkeypatch: pytest.MonkeyPatch, registered: Any
) -> None:
    """SGLang drops a hook on a target that it has patched already, without a word."""
    hook = compat.LAUNCHER_HOOKS[-1]
    monkeypatch.setattr(registered, "_patched", {hook.target})
    with pytest.raises(IncompatibleSglangError, match=f"another plugin has hooked {hook.target}"):
        compat.install([hook])
