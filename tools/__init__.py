"""What builds notebooks, decks, book, tables and pictures: ``python -m tools.NAME``. None of it is in the wheel."""
