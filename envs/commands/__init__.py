"""The commands of `python -m envs`: a module each, with `main(arguments) -> exit status`; the table is in `envs/__main__.py`."""
