"""Writes texts.jsonl, functions of Python's own library with their packages, and tokenizer.json, learned from them."""

import ast
import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

library, texts = Path(sysconfig.get_path("stdlib")), []
for package in ("asyncio", "email", "importlib", "multiprocessing", "xml"):
    for file in sorted((library / package).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        functions = (
            node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        texts += [{"text": ast.get_source_segment(source, node), "package": package} for node in functions]
Path("texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=["<pad>", "<end>"], initial_alphabet=letters)
tokenizer.train_from_iterator((text["text"] for text in texts), trainer)
tokenizer.save("tokenizer.json")
