"""A fast tokenizer that every loader takes as it was saved."""

from transformers import PreTrainedTokenizerFast


class SavedTokenizer(PreTrainedTokenizerFast):
    """`tokenizer.json`, unchanged.

    AutoTokenizer distrusts the class that a folder names for some architectures (qwen2 among them) and puts the architecture's own
    pre-tokenizer in its place. It leaves a folder alone that brings its class with it: this file is saved beside the tokenizer.
    """


SavedTokenizer.register_for_auto_class("AutoTokenizer")
