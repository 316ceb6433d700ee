"""The course in a web page, without an installation: ``make browser``, or ``dtlib browser``.

The page consists of rooms. Each room is one form with one answer:

    build.py       write the page to a folder and to one file, with Python for browsers (npm's pyodide)
    pages.py       list the rooms, and compute the answer of each
    fields.py      sliders, choices and texts, as HTML
    svg.py         pictures, with a text for readers who cannot see them
    schedule.py, puzzle.py, duel.py, steps.py, memory.py, plan.py, chart.py, quiz.py, words.py, ranks.py,
    exercise.py    one room each
    simulated/     ranks that take turns in one process, for a learner's cell
    site/          HTML, CSS, and JavaScript that sends a form to Python and shows the answer

JavaScript computes no answers: the library's own files compute them, unchanged.
"""
