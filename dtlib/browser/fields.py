"""The fields of a room's form: sliders, choices and texts. A field's name is the name of an argument of ``show``."""

from dataclasses import dataclass
from html import escape

from dtlib.errors import number, read_number


@dataclass(frozen=True)
class Number:
    """An input for a number between ``low`` and ``high``."""

    name: str
    label: str
    value: float
    low: float
    high: float
    step: float = 1

    def read(self, text: str) -> float:
        """Return the number in ``text``; raise an error if it is out of bounds."""
        return number(self.label, read_number(text), self.low, self.high, whole=self.step == 1)

    def html(self, room: str) -> str:
        """Return the field as HTML."""
        where = f'id="{room}-{self.name}" name="{self.name}"'
        limits = f'min="{self.low}" max="{self.high}" step="any" value="{self.value:g}"'
        return _labelled(self, room, f'<input type="number" {where} {limits}>')


class Slider(Number):
    """A slider for a number between ``low`` and ``high``."""

    def html(self, room: str) -> str:
        """Return the field as HTML."""
        where = f'id="{room}-{self.name}" name="{self.name}"'
        limits = f'min="{self.low:g}" max="{self.high:g}" step="{self.step:g}" value="{self.value:g}"'
        output = f'<output for="{room}-{self.name}">{self.value:g}</output>'
        return _labelled(self, room, f'<span><input type="range" {where} {limits}> {output}</span>')


@dataclass(frozen=True)
class Choice:
    """A list to choose from; ``options`` maps values to labels."""

    name: str
    label: str
    value: str
    options: dict

    def read(self, text: str) -> str:
        """Return ``text``; raise ``ValueError`` if it is no option."""
        if text not in self.options:
            raise ValueError(f"{self.label} is {text!r}: choose one of {', '.join(self.options)}.")
        return text

    def html(self, room: str) -> str:
        """Return the field as HTML."""
        options = "".join(
            f'<option value="{escape(value)}"{" selected" * (value == self.value)}>{escape(shown)}</option>'
            for value, shown in self.options.items()
        )
        return _labelled(self, room, f'<select id="{room}-{self.name}" name="{self.name}">{options}</select>')


@dataclass(frozen=True)
class Text:
    """Lines that a learner writes. The browser saves them; the room reads them when a button is pressed."""

    name: str
    label: str
    value: str
    rows: int = 4

    def read(self, text: str) -> str:
        """Return ``text`` unchanged."""
        return text

    def html(self, room: str) -> str:
        """Return the field as HTML."""
        attributes = f'id="{room}-{self.name}" name="{self.name}" rows="{self.rows}" spellcheck="false" wrap="off"'
        return _labelled(self, room, f"<textarea {attributes}>{escape(self.value)}</textarea>")


@dataclass(frozen=True)
class Hidden:
    """A hidden value that the room itself sets, such as the answers so far. It is part of the page's address."""

    name: str
    value: str = ""

    def read(self, text: str) -> str:
        """Return ``text`` unchanged."""
        return text

    def html(self, room: str) -> str:
        """Return the field as HTML."""
        return f'<input type="hidden" name="{self.name}" value="{escape(self.value)}">'


@dataclass(frozen=True)
class Button:
    """A button. The room's argument ``pressed`` is the name of the button that was pressed last."""

    name: str
    label: str

    def html(self, room: str) -> str:
        """Return the button as HTML."""
        return f'<button name="pressed" value="{self.name}">{escape(self.label)}</button>'


def put(name: str, value: object) -> str:
    """Return hidden HTML that makes the page set the field ``name`` to ``value``."""
    return f'<data hidden data-field="{name}">{escape(str(value))}</data>'


def _labelled(field, room: str, control: str) -> str:
    return f'<label for="{room}-{field.name}"><span>{escape(field.label)}</span>{control}</label>'
