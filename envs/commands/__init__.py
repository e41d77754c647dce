"""The commands of `python -m envs`: a module each, with `main(arguments) -> exit status`; see `envs/__main__.py`."""
