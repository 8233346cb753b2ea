"""Small trained tokenizers that split texts differently: WordPiece, byte-level BPE and SentencePiece's Unigram."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

SENTENCES = [
    "The old mill stood by the river, and nobody knew who had built it.",
    "She was reading by the window when the rain began; the rain did not stop.",
    "A miller's daughter can be unbelievably kind, or unkind: it depends!",
    "They walked along the river until the mill was out of sight.",
    "Nobody had been reading there, nobody had been walking, and it rained.",
    "Überall war es still; das Mädchen aß Käse und 中文 las niemand 😀.",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@cache
def wordpiece(size: int = 140) -> BertTokenizerFast:
    """Returns an uncased WordPiece tokenizer that strips accents."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return BertTokenizerFast(vocab=backend.get_vocab())


@cache
def byte_level(
    size: int = 330, trim: bool = True, masked: bool = False, texts: tuple[str, ...] = tuple(SENTENCES)
) -> PreTrainedTokenizerFast:
    """Returns a cased byte-level BPE tokenizer; with `trim` the offsets of ` word` are those of `word`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    special = ["<eos>", "<pad>"] + ["<mask>"] * masked
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    named = {"eos_token": "<eos>", "pad_token": "<pad>"} | ({"mask_token": "<mask>"} if masked else {})
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


@cache
def sentencepiece(size: int = 120) -> PreTrainedTokenizerFast:
    """Returns a cased Unigram tokenizer with a token before each text and byte fallback for unknown letters."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(SENTENCES, trainers.UnigramTrainer(vocab_size=size, show_progress=False))
    pieces = [tuple(each) for each in json.loads(backend.to_str())["model"]["vocab"]]
    first = [(token, 0.0) for token in ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))]
    backend.model = models.Unigram(first + pieces, unk_id=0, byte_fallback=True)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)
