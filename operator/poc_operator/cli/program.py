# SPDX-License-Identifier: Apache-2.0
"""The program ``kubectl-poc``: its commands, what it does with errors, and completion under kubectl.

kubectl asks a program ``kubectl_complete-poc`` on the ``PATH``. A wheel installs one. Krew links only one program of a
plugin, so ``completion`` writes a script of that name, which asks the plugin itself.
"""

import contextlib
import io
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from poc_operator.cli import bundle_commands, fleet_commands, output, round_commands, work_commands
from poc_operator.cli.check_commands import check
from poc_operator.cli.cluster import FAILED, UserError, connect
from poc_operator.cli.explanation import account, sentences
from poc_operator.cli.looking import evidence, forwarding, look, overviews, subject
from poc_operator.cli.options import Context, Everywhere, GatewayPlace, Kubeconfig, Namespace, Output, SubjectName
from poc_operator.cli.output import Format
from poc_operator.cli.overview import overview
from poc_operator.cli.overview_tables import tables

PROGRAM = "kubectl-poc"
#: The program that kubectl asks, and the first word with which its script asks ours, as cobra's programs have it.
ASKED, COMPLETE = "kubectl_complete-poc", "__complete"
#: The last line tells kubectl whether to offer files, too (cobra's ShellCompDirectiveDefault and -NoFileComp).
_FILES, _NO_FILES = ":0", ":4"
#: Options whose value is a file.
_TAKE_FILES = ("--filename", "-f", "--kubeconfig", "--png")
#: Seconds between two looks of a live table, unless told otherwise.
LOOK_SECONDS = 2.0
#: Set to anything, it shows where an unexpected error came from.
TRACEBACK = "POC_TRACEBACK"
#: Exit code after Ctrl-C, as shells have it.
_INTERRUPTED = 130

SCRIPT = f"""#!/bin/sh
# kubectl runs this to complete `kubectl poc`, for bash, zsh, fish and PowerShell alike.
exec {PROGRAM} {COMPLETE} "$@"
"""

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(round_commands.app, name="round")
app.add_typer(fleet_commands.app, name="fleet")
app.command()(check)
app.command()(bundle_commands.bundle)
app.command()(work_commands.validate)
app.command()(work_commands.calibrate)


@app.callback()
def before_the_command(
    ctx: typer.Context, context: Context = None, kubeconfig: Kubeconfig = None, namespace: Namespace = None
) -> None:
    """Fleets of vLLM pods and Proof-of-Compute rounds: what they do, why, and what to do next."""
    # As with kubectl, these may stand before the command, as in all the commands that we print. Behind it they win.
    given = {"context": context, "kubeconfig": kubeconfig and str(kubeconfig), "namespace": namespace}
    ctx.default_map = _defaults(ctx.command, {name: value for name, value in given.items() if value})


def _defaults(command: object, given: Mapping[str, str]) -> dict[str, Any]:
    """Return what each command below takes unless it is told otherwise."""
    below = getattr(command, "commands", {})
    return dict(given) | {name: _defaults(one, given) for name, one in below.items()}


@app.command()
def status(
    *,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    everywhere: Everywhere = False,
    format_: Output = Format.TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    seconds: Annotated[float, typer.Option("--interval", min=0.5, help="Seconds between looks.")] = LOOK_SECONDS,
    chat: Annotated[bool, typer.Option(help="Ask the pods whether chat holds them back.")] = True,
) -> None:
    """Show fleets, rounds with their slots, and pods."""
    cluster = connect(context, namespace, kubeconfig)
    if watch and format_ is not Format.TABLE:
        raise UserError("--watch shows tables: leave out --output, or ask again in a loop", 2)
    if watch:
        looks = overviews(lambda: look(cluster, everywhere=everywhere, chat=chat), seconds, over=lambda _: False)
        output.follow(looks, lambda found: tables(found, everywhere=everywhere))
        return
    found = overview(look(cluster, everywhere=everywhere, chat=chat))
    if format_ is Format.TABLE:
        output.console().print(tables(found, everywhere=everywhere))
    else:
        output.show(found.model_dump(mode="json", by_alias=True), format_)


@app.command()
def explain(
    name: SubjectName,
    *,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    namespace: Namespace = None,
    gateway: GatewayPlace = None,
    format_: Output = Format.TABLE,
) -> None:
    """Say why a round, a fleet, a validation or a calibration is where it is, and what to do next."""
    cluster = connect(context, namespace, kubeconfig)
    found = subject(cluster, name)
    told = account(evidence(cluster, found, forwarding(cluster, found, gateway), gateway))
    if format_ is Format.TABLE:
        sys.stdout.write("\n".join(sentences(told)) + "\n")
    else:
        output.show(told.model_dump(mode="json", by_alias=True), format_)


@app.command()
def completion(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder on the PATH to write it into; standard output without it.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Write the script by which kubectl completes this plugin, in each shell for which kubectl itself completes."""
    if folder is None:
        sys.stdout.write(SCRIPT)
        return
    file = folder / ASKED
    _write_new(file)
    sys.stdout.write(f"{file} written\n")
    found = shutil.which(ASKED)
    if found is None or not file.samefile(found):
        sys.stderr.write(
            f"note: kubectl does not find it: put {folder.absolute()} into the PATH, before other folders\n"
        )


def _write_new(file: Path) -> None:
    try:
        with file.open("x") as target:
            target.write(SCRIPT)
        file.chmod(0o755)
    except FileExistsError as error:  # it may be the link to that of a wheel, which must not be written over
        raise UserError(f'"{file}" exists: delete it, or keep it if kubectl completes') from error
    except OSError as error:
        raise UserError(f'"{file}" cannot be written ({error.strerror}): name a folder on the PATH') from error


def main() -> None:
    """Run the program; errors are one sentence, and never a traceback."""
    if sys.argv[1:2] == [COMPLETE]:  # not a command: options among the words are not options of it
        complete(sys.argv[2:])
        return
    sys.exit(guarded(lambda: app(prog_name=PROGRAM)))


def guarded(run: Callable[[], object]) -> int:
    """Return the exit code of what is run, and tell its error."""
    try:
        run()
    except UserError as error:
        return _tell(str(error), error.code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # what reads us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if TRACEBACK in os.environ:
            raise
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        return _tell(f"this is a defect of the plugin ({what}): report it with the output of {TRACEBACK}=1", FAILED)
    return 0


def _tell(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code


def complete(words: Sequence[str] | None = None) -> None:
    """Answer kubectl with a line for each completion, and the directive.

    It runs ``kubectl_complete-poc`` with the words so far, the last of which is not complete.
    """
    asked = sys.argv[1:] if words is None else words
    takes_file = len(asked) > 1 and asked[-2] in _TAKE_FILES
    lines = [] if takes_file else completions(asked)
    sys.stdout.write("".join(f"{line}\n" for line in lines) + f"{_FILES if takes_file else _NO_FILES}\n")


def completions(words: Sequence[str]) -> list[str]:
    """Return what the last word may become, each with a tab and its help if it has one."""
    # Typer prints what a shell wants; for fish that is one candidate a line.
    variables = {
        "_KUBECTL_POC_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": shlex.join([PROGRAM, *words[:-1]]) + " " + (words[-1] if words else ""),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    os.environ.update(variables)
    told = io.StringIO()
    # Whatever fails is told by the command itself: here it would stand in the middle of the user's line.
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit, Exception):
        app(prog_name=PROGRAM)
    return [line for line in told.getvalue().splitlines() if line]
