"""The course in a web page, without an installation: ``make browser``, or ``dtlib browser``.

build.py       a folder with Python for browsers (npm's pyodide), the files below and those of dtlib that they need; and
               the same as one file
rooms.py       the rooms of the page: what each asks, and where it is at home in the course
fields.py      sliders, choices and texts, as HTML
svg.py         pictures, with words for who does not see them
schedule.py, puzzle.py, duel.py, steps.py, memory.py, plan.py, chart.py, quiz.py, words.py, ranks.py,
exercise.py    a room each
simulated/     ranks that take turns in one process, and what a learner's cell finds there
site/          the page itself: HTML, CSS, and JavaScript that hands what is asked to Python, and shows what it answers

Nothing is imitated in JavaScript: what a room shows is computed by the library's own files, unchanged.
"""
