"""Tests of dtlib, in the order of its packages; ``lessons/lNN`` has wrong answers that judges must reject."""
