"""The way out of the classroom: the same engine, run by the production libraries."""
