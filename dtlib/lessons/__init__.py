"""Each lesson's figures and its judges, side by side."""
