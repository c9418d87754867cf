"""Prints the output of ranks on our own stdout and stderr, line by line."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
from collections.abc import Callable, Hashable, Sequence

from msgspec import Struct

from meshrun.console.escapes import CLEAR_BELOW, CLEAR_LINE, colored, fit, panel_block
from meshrun.console.lines import LineAssembler, Piece, Prefix, as_json_lines
from meshrun.console.outlet import Outlet, is_reader_gone
from meshrun.host.printable import printable
from meshrun.host.process_state import is_foreground
from meshrun.host.reactor import Reactor
from meshrun.host.stderr import discard_output
from meshrun.protocol.caller import end_of_call
from meshrun.wording import count

QUEUE_BYTES = 1024 * 1024
"""While more than this waits for a slow reader, ranks are not read, so that they block too."""
_PARTIAL_AFTER_NS = 50_000_000
"""How long to wait for the end of a line before its beginning is shown."""
_READ_WITHIN_NS = 500_000_000
"""How long to wait for the rank to read, if the beginning may be a prompt."""
_LOOK_EVERY_NS = 250_000_000
"""How often to check whether it reads after all."""
_REDRAW_EVERY_NS = 500_000_000
"""How often to draw the panel on a terminal that cannot keep up."""
_STATES_EVERY_NS = 10_000_000_000
"""How often a progress bar in a file may take the line from another rank's."""
_RECENT_BYTES = 4096


class RankStream(Struct, eq=False):
    """One of the two streams of a rank, on its way to an outlet."""

    outlet: Outlet
    lines: LineAssembler
    may_prompt: bool = False
    begun_ns: int = 0
    """When the line began that has not ended."""
    shown: bytes = b""
    """What was shown of it."""
    fields: dict[str, object] = {}
    """Fields of each line in JSON, beside its text."""


class Console:
    """Our stdout and stderr: whole lines, with a changing line and a panel below them.

    Args:
        host: This host, for notes, if other launchers print to the same output; "" if none does.
    """

    def __init__(
        self, stdout: int = 1, stderr: int = 2, *, is_json: bool = False, host: str = ""
    ) -> None:
        self._is_json = is_json
        self._host = f"{host}: " if host else ""
        self._out = Outlet(stdout)
        self._err = self._out if os.path.sameopenfile(stdout, stderr) else Outlet(stderr)
        self._partial: dict[RankStream, int] = {}
        """Streams in the middle of a line, and when to look at it (ns)."""
        self._bar: tuple[Hashable, bytes] | None = None
        """On a terminal: the owner and the text of the changing line."""
        self._prompt: tuple[RankStream, bytes] | None = None
        """The line that the rank with stdin has begun, which may be a prompt."""
        self.is_read: Callable[[], bool] = lambda: False
        """Whether that rank reads the terminal; if so, its prompt takes the changing line."""
        self._asking: RankStream | None = None
        """The stream of a prompt that was shown while the rank read; Enter ends its line."""
        self._open: dict[Outlet, Hashable] = {}
        """Elsewhere: the owner of the line that was written last, if it has not ended."""
        self._state_ns: dict[Hashable, int] = {}
        """When each owner last took the line from another's progress state."""
        self._status = b""
        self.is_shared = False
        """Whether a rank writes to the terminal directly, so that only whole lines are printed."""
        self.is_typed_on: Callable[[], bool] = lambda: False
        """Whether the user types to another process on our terminal; ranks are not read then."""
        self._panel: tuple[bytes, ...] = ()
        self._drawn_ns = 0
        self._was_drawn = False
        self._is_foreground = True
        """Whether we are in the foreground, and so may draw below the lines and clear there."""
        self._is_stdout_piped = False
        """Whether lines went to a pipe on stdout, whose reader may print on our terminal."""
        self._reported_lost: set[Outlet] = set()
        self._recent = b""
        """The last lines on stderr."""

    def stream(
        self, *, rank: int, prefix: Prefix, to_stderr: bool, may_prompt: bool = False
    ) -> RankStream:
        """Return a new stream of a rank; ``prefix`` goes before each of its lines."""
        outlet = self._err if to_stderr else self._out
        if self._is_json:
            text = b"" if callable(prefix) else prefix
            label = text.decode(errors="replace").strip("[] ")
            stream = "stderr" if to_stderr else "stdout"
            fields = {"source": "rank", "rank": rank, "label": label, "stream": stream}
            return RankStream(outlet, LineAssembler(), fields=fields)
        if outlet.moves_cursor and not os.environ.get("NO_COLOR"):
            prefix = colored(prefix, rank)
        return RankStream(outlet, LineAssembler(prefix), may_prompt)

    # ---- in --------------------------------------------------------------------------------

    def feed(self, stream: RankStream, data: bytes) -> None:
        """Take the next bytes of a rank's stream; ``b""`` is its end."""
        if stream is self._asking:
            self._asking = None
            stream.lines.drop_pending()
        pieces = stream.lines.feed(data) if data else stream.lines.finish()
        for piece in pieces:
            self._show(stream, stream.outlet, piece)
        may_wait = stream.outlet.is_terminal or stream.may_prompt
        may_wait &= not (self.is_shared or self._is_json)
        if not (stream.lines.pending and may_wait):
            self._partial.pop(stream, None)
        elif stream not in self._partial:
            stream.begun_ns, stream.shown = time.monotonic_ns(), b""
            self._partial[stream] = stream.begun_ns + _PARTIAL_AFTER_NS

    def print_line(self, line: bytes, *, to_stderr: bool) -> None:
        """Print a whole line that belongs to no stream."""
        self._show(self, self._err if to_stderr else self._out, Piece(line + b"\n"))

    def end_call(self, number: int) -> None:
        """Write a mark that ends the output of a call, for the reader of our output."""
        for outlet in {self._out, self._err}:
            outlet.write(end_of_call(number))

    def print_record(self, line: str) -> None:
        """Print a JSON object to stdout as it is."""
        if self._is_json:
            self._out.write(f"{line}\n".encode())
        else:
            self.print_line(line.encode(), to_stderr=False)

    def note(self, text: str) -> None:
        """Print a line of meshrun's own to stderr."""
        line = printable(f"meshrun: {self._host}{text}")
        self._show(self, self._err, Piece(f"{line}\n".encode()))

    @property
    def window(self) -> os.terminal_size | None:
        """Columns and lines of the terminal that shows the ranks' lines, if there is one."""
        return None if self._is_json else self._out.window

    def has_just_shown(self, lines: Sequence[str]) -> bool:
        """Return whether these are among the last lines on stderr."""
        return all(line.encode(errors="replace") in self._recent for line in lines)

    @property
    def shows_status(self) -> bool:
        """Whether stderr is a terminal on which a status line can be shown and removed."""
        is_free = not (self.is_shared or self._is_stdout_piped or self._is_json)
        return self._err.moves_cursor and is_free

    def set_status(self, text: str) -> None:
        """Show ``text`` below the lines of a terminal, replacing the last one; "" removes it."""
        if not self.shows_status:
            return
        self._status = f"meshrun: {text}".encode(errors="backslashreplace") if text else b""
        if not self._is_prompting:
            self._redraw(self._err)

    @property
    def can_show_panel(self) -> bool:
        """Whether lines can stay at the end of stderr, because nothing else prints there."""
        return self.shows_status and (self._out is self._err or not self._out.needs_select)

    def set_panel(self, lines: Sequence[str]) -> None:
        """Show these lines below everything else, replacing the last ones; none removes them.

        They stay below a line that is being typed, and must fit the window.
        """
        before = self._panel
        self._panel = tuple(line.encode(errors="replace") for line in lines)
        if self._err.queued_bytes or not self._check_foreground(self._err):
            return
        if before and self._panel and self._was_drawn:
            self._err.write(panel_block(self._panel))
        elif before or self._panel:
            clear = CLEAR_BELOW if before else CLEAR_LINE if self._was_drawn else b""
            self._err.write(clear + self._below())
            self._was_drawn = bool(self._below())

    def show_waiting(self) -> None:
        """Show lines that have waited long enough for their end, as prompts do; draw the panel."""
        now_ns = time.monotonic_ns()
        for stream, look_ns in list(self._partial.items()):
            if now_ns >= look_ns:
                self._show_beginning(stream, now_ns)
        # A slow terminal is busy enough with the lines.
        is_due = not self._err.queued_bytes or now_ns >= self._drawn_ns + _REDRAW_EVERY_NS
        if self._panel and not self._was_drawn and is_due and self._check_foreground(self._err):
            self._err.write(self._below())
            self._was_drawn, self._drawn_ns = True, now_ns

    @property
    def next_wake_ns(self) -> int | None:
        """When :meth:`show_waiting` has something to do, or ``None``."""
        return min(self._partial.values(), default=None)

    # ---- out -------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Outlet]:
        """Outlets with bytes that a slow reader has not taken yet."""
        return [outlet for outlet in {self._out, self._err} if outlet.queued_bytes]

    def watch_readers(self, reactor: Reactor) -> None:
        """Have the reactor write on once readers take more, and stop where nothing waits."""
        for outlet in {self._out, self._err}:
            if not outlet.queued_bytes:
                reactor.remove_writer(outlet)
            elif outlet.needs_select:
                reactor.add_writer(outlet, outlet.flush)
            else:
                outlet.flush()

    def wait_for_reader(self, reactor: Reactor, timeout_s: float | None) -> None:
        """Block until a reader takes more, or for the timeout; for the end of a launch."""
        self.watch_readers(reactor)
        if self.waiting:
            reactor.poll(timeout_s)

    def drain(self, timeout_s: Callable[[], float | None]) -> None:
        """Block until readers have taken everything; drop the rest once the timeout is 0."""
        while (waiting := self.waiting) and (left_s := timeout_s()) != 0.0:
            for outlet in select.select([], waiting, [], left_s)[1]:
                outlet.flush()
        self.drop_waiting()

    def drop_waiting(self) -> int:
        """Discard what readers have not taken; return the number of bytes.

        If that includes stderr, later output to it is discarded as well.
        """
        waiting = self.waiting
        if self._err in waiting:
            discard_output(sys.stderr)
        return sum(outlet.drop() for outlet in waiting)

    def note_dropped(self, number: int) -> None:
        """Note how many bytes of the ranks' output were discarded."""
        self.note(f"dropped {count(number, 'byte')} of output: its reader cannot keep up")

    @property
    def is_full(self) -> bool:
        """Whether ranks should not be read for now."""
        if self.is_typed_on():
            return True
        return any(outlet.queued_bytes > QUEUE_BYTES for outlet in {self._out, self._err})

    @property
    def reader_is_gone(self) -> bool:
        """Whether the reader of our output has closed it."""
        errors = (outlet.error for outlet in (self._out, self._err))
        return any(error is not None and is_reader_gone(error) for error in errors)

    def note_lost_output(self) -> None:
        """Report that a stream cannot be written, or can be again; the launch continues."""
        for name, outlet in (("stdout", self._out), ("stderr", self._err)):
            if outlet.error is None and outlet in self._reported_lost:
                self._reported_lost.remove(outlet)
                self.note(
                    f"writing to {name} works again; dropped {count(outlet.lost_bytes, 'byte')}"
                )
            elif outlet.error is not None and outlet not in self._reported_lost:
                self._reported_lost.add(outlet)
                if not is_reader_gone(outlet.error):
                    reason = outlet.error.strerror
                    self.note(f"cannot write to {name} ({reason}); what ranks print there is lost")

    def leave_terminal(self) -> None:
        """Remove what is below the lines, as the shell prints there next."""
        for outlet in {self._out, self._err}:
            if outlet.moves_cursor and not self.is_shared:
                if self._check_foreground(outlet):
                    outlet.write(CLEAR_BELOW if self._panel else CLEAR_LINE)
            elif self._open.pop(outlet, None) is not None:
                outlet.write(b"\n")
        self._was_drawn = False

    def return_to_terminal(self) -> None:
        """Draw what is below the lines again, if we are in the foreground."""
        if self.shows_status:
            self._redraw(self._err)

    def close(self) -> None:
        """Remove what is below the lines, for good."""
        self.leave_terminal()
        self._prompt, self._bar, self._status, self._panel = None, None, b"", ()

    def _as_json(self, owner: Hashable, text: bytes) -> bytes:
        fields = owner.fields if isinstance(owner, RankStream) else {"source": "meshrun"}
        shown = text.decode(errors="backslashreplace")
        if owner is self:
            shown = shown.removeprefix("meshrun: ")
        return as_json_lines(shown, **fields).encode()

    def _show_beginning(self, stream: RankStream, now_ns: int) -> None:
        """Show the beginning of a line; look at it until it ends or proves to be a prompt."""
        is_prompt = stream.may_prompt and self.is_read()
        if stream.may_prompt and not is_prompt:  # the rank may be about to read
            is_early = now_ns < stream.begun_ns + _READ_WITHIN_NS
            self._partial[stream] = now_ns + (_PARTIAL_AFTER_NS if is_early else _LOOK_EVERY_NS)
            if is_early or stream.shown == stream.lines.pending:
                return
        else:
            del self._partial[stream]
        if stream.outlet.moves_cursor:
            self._show_changing(stream, stream.lines.pending, stream.outlet)
        elif stream.outlet.is_terminal or is_prompt:  # or before `| tee log`
            self._begin_line(stream)
        stream.shown = stream.lines.pending

    def _begin_line(self, stream: RankStream) -> None:
        """Show the beginning of a line where it cannot be erased.

        The whole line repeats it, unless it is a prompt.
        """
        begun = (stream, stream.lines.pending)
        if self._open.get(stream.outlet) != begun:
            if stream.outlet in self._open:
                stream.outlet.write(b"\n")
            stream.outlet.write(stream.lines.pending)
        self._asking = stream if self._enter_ends_line else None
        continues = self._asking is stream and stream.outlet.is_terminal
        self._open[stream.outlet] = stream if continues else begun

    def _show(self, owner: Hashable, outlet: Outlet, piece: Piece) -> None:
        if self._is_json:
            if not piece.is_state:
                outlet.write(self._as_json(owner, piece.text))
            return
        if outlet is self._err and not piece.is_state:
            self._recent = (self._recent + piece.text[-_RECENT_BYTES:])[-_RECENT_BYTES:]
        if outlet.moves_cursor:
            self._show_on_terminal(owner, outlet, piece)
            return
        if outlet is self._out and outlet.needs_select and self.shows_status:
            self.set_status("")  # as for `| tee log`
            self._is_stdout_piped = True
        # A progress state stays open for its owner to continue; others begin a new line.
        open_owner = self._open.get(outlet)
        if open_owner is not None and open_owner is not owner:
            now_ns = time.monotonic_ns()
            if piece.is_state and now_ns < self._state_ns.get(owner, 0) + _STATES_EVERY_NS:
                return  # progress bars of several ranks would fill a file
            self._state_ns[owner] = now_ns
            outlet.write(b"\n")
        self._open.pop(outlet, None)
        outlet.write(piece.text)
        if piece.is_state:
            self._open[outlet] = owner

    def _show_on_terminal(self, owner: Hashable, outlet: Outlet, piece: Piece) -> None:
        if self._prompt is not None and self._prompt[0] is owner and not self.is_read():
            self._prompt = None
        if piece.is_state:
            if not self.is_shared:
                self._show_changing(owner, piece.text[:-1], outlet)
            return
        if self._bar is not None and self._bar[0] is owner:
            self._bar = None
        self._check_foreground(outlet)
        below = self._changing_line()
        if self._panel:  # drawn again once per turn, however many lines are printed in it
            outlet.write((CLEAR_BELOW if self._was_drawn else b"") + piece.text)
            self._was_drawn = False
        elif below or self._was_drawn:
            outlet.write(CLEAR_LINE + piece.text + below)
            self._was_drawn = bool(below)
        else:
            outlet.write(piece.text)

    def _show_changing(self, owner: Hashable, text: bytes, outlet: Outlet) -> None:
        is_shown = self._was_drawn and self._bar == (owner, text)
        self._bar = (owner, text)
        if isinstance(owner, RankStream) and owner.may_prompt:
            self._prompt = (owner, text)
            self._asking = owner if self._enter_ends_line else None
        elif self._is_prompting:  # drawing would erase what the user is typing
            return
        if not is_shown:  # it would erase what the user has typed already
            self._redraw(outlet)

    @property
    def _enter_ends_line(self) -> bool:
        """Whether the rank with stdin reads the terminal, which echoes what the user types."""
        try:
            return self.is_read() and bool(termios.tcgetattr(0)[3] & termios.ECHO)
        except termios.error:  # the terminal is gone
            return False

    @property
    def _is_prompting(self) -> bool:
        return self._prompt is not None and self.is_read()

    def _changing_line(self) -> bytes:
        if not self._is_foreground:
            return b""
        shown = self._prompt if self._is_prompting else self._bar
        text = shown[1] if shown is not None else self._status
        window = self._err.window
        return fit(text, (window.columns if window else 0) or 80) if text else b""

    def _below(self) -> bytes:
        return self._changing_line() + panel_block(self._panel if self._is_foreground else ())

    def _check_foreground(self, outlet: Outlet) -> bool:
        """Return whether we are in the foreground; if not, the shell has overwritten our lines."""
        self._is_foreground = is_foreground(outlet.fileno())
        self._was_drawn = self._was_drawn and self._is_foreground
        return self._is_foreground

    def _redraw(self, outlet: Outlet) -> None:
        self._check_foreground(outlet)
        below = self._below()
        if below or self._was_drawn:
            outlet.write((CLEAR_BELOW if self._panel else CLEAR_LINE) + below)
        self._was_drawn = bool(below)
