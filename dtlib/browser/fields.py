"""What a room asks: sliders, choices and texts. Each has a name, under which its value reaches the room."""

from dataclasses import dataclass
from html import escape

from dtlib.errors import number, read_number


@dataclass(frozen=True)
class Number:
    """A number that is typed; ``low`` and ``high`` are what makes sense."""

    name: str
    label: str
    value: float
    low: float
    high: float
    step: float = 1

    def read(self, text: str) -> float:
        return number(self.label, read_number(text), self.low, self.high, whole=self.step == 1)

    def html(self, room: str) -> str:
        where = f'id="{room}-{self.name}" name="{self.name}"'
        limits = f'min="{self.low}" max="{self.high}" step="any" value="{self.value:g}"'
        return _labelled(self, room, f'<input type="number" {where} {limits}>')


class Slider(Number):
    def html(self, room: str) -> str:
        where = f'id="{room}-{self.name}" name="{self.name}"'
        limits = f'min="{self.low:g}" max="{self.high:g}" step="{self.step:g}" value="{self.value:g}"'
        output = f'<output for="{room}-{self.name}">{self.value:g}</output>'
        return _labelled(self, room, f'<span><input type="range" {where} {limits}> {output}</span>')


@dataclass(frozen=True)
class Choice:
    """``options`` maps values to what is shown of them."""

    name: str
    label: str
    value: str
    options: dict

    def read(self, text: str) -> str:
        if text not in self.options:
            raise ValueError(f"{self.label} is {text!r}: choose one of {', '.join(self.options)}.")
        return text

    def html(self, room: str) -> str:
        options = "".join(
            f'<option value="{escape(value)}"{" selected" * (value == self.value)}>{escape(shown)}</option>'
            for value, shown in self.options.items()
        )
        return _labelled(self, room, f'<select id="{room}-{self.name}" name="{self.name}">{options}</select>')


@dataclass(frozen=True)
class Text:
    """Lines that a learner writes; the browser keeps them. They are read when a button is pressed."""

    name: str
    label: str
    value: str
    rows: int = 4

    def read(self, text: str) -> str:
        return text

    def html(self, room: str) -> str:
        attributes = f'id="{room}-{self.name}" name="{self.name}" rows="{self.rows}" spellcheck="false" wrap="off"'
        return _labelled(self, room, f"<textarea {attributes}>{escape(self.value)}</textarea>")


@dataclass(frozen=True)
class Kept:
    """What the room itself keeps, such as the answers so far: not seen, and part of the address."""

    name: str
    value: str = ""

    def read(self, text: str) -> str:
        return text

    def html(self, room: str) -> str:
        return f'<input type="hidden" name="{self.name}" value="{escape(self.value)}">'


@dataclass(frozen=True)
class Press:
    """A button; a room finds in ``pressed`` the name of the one that was pressed last."""

    name: str
    label: str

    def html(self, room: str) -> str:
        return f'<button name="pressed" value="{self.name}">{escape(self.label)}</button>'


def put(name: str, value: object) -> str:
    """What a room's answer has beside what is shown: the page puts ``value`` into the field ``name``."""
    return f'<data hidden data-field="{name}">{escape(str(value))}</data>'


def _labelled(field, room: str, control: str) -> str:
    return f'<label for="{room}-{field.name}"><span>{escape(field.label)}</span>{control}</label>'
