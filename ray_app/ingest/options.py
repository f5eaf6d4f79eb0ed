"""The options of an ingest and their check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from ray_app.config.rules import NonNegativeInt, NumberRange, PositiveInt, Rule, check_fields, find_broken_rules, refuse
from ray_app.errors import ConfigError, RayAppError
from ray_app.storage.data_files import is_within
from ray_app.storage.files import to_location

Source = Literal[
    "images",
    "coco",
    "voc",
    "yolo",
    "csv",
    "jsonl",
    "numpy",
    "idx",
    "webdataset",
    "tfrecord",
    "hf",
    "parquet",
    "digits",
]

ROW_GROUP_ROWS, ROW_GROUP_BYTES = 500, 32 << 20
"""Maximum rows, and bytes before compression, of a row group; a larger row has one of its own.

They are few against a shuffle window, which reads whole row groups.
"""
_DIGITS_ROWS = 5_000
"""Maximum rows of a row group of the bundled images, which are all in one."""


@dataclass(frozen=True)
class FormatTraits:
    """What distinguishes a raw format from the others for the ingest.

    Args:
        options: The options that it has, of those that not all formats have.
        eval_fraction: Default of `eval_fraction` for a source with named data sets.
        has_named_parts: Its data sets always have names, so that the default of `eval_fraction` always counts.
        divides_rows: It divides its rows into `train` and `eval` itself.
        leaves_out_columns: It leaves out the columns of the option `drop` itself, before it reads their values.
        has_input: It reads an input.
        has_output: It is written; otherwise it can be trained on as it is.
    """

    options: frozenset[str] = frozenset()
    eval_fraction: float = 0.0
    has_named_parts: bool = False
    divides_rows: bool = False
    leaves_out_columns: bool = False
    has_input: bool = True
    has_output: bool = True


@dataclass(frozen=True)
class IngestOptions:
    """What to read and how to write it; checked by `ingest`.

    Args:
        source: Raw format. images: a folder with one sub-folder per class, or with separate labels or masks. coco: a
            JSON file of COCO, or a folder of them. voc: a folder of Pascal VOC, with XML files. yolo: data.yaml of
            YOLO, or a folder with images, labels and classes.txt. csv: a .csv, .tsv or .gz file, or a folder of them.
            jsonl: the same with one JSON object per line (.jsonl, .ndjson, .gz), or one list of objects per file
            (.json). numpy: an .npz file or a folder with x.npy and y.npy, or with x_train, y_train, x_test and y_test
            as in Keras' mnist.npz, or also with val, or with train_images as in MedMNIST. idx: a folder with
            MNIST-format files. webdataset: tar files, as a folder, a file, or a pattern with * or {000..012}. tfrecord:
            TFRecord files of `tf.train.Example`, as for webdataset. hf: a data set that Hugging Face `datasets` saved
            with save_to_disk, or its .arrow, .feather or .parquet files. parquet: Parquet needs no conversion; it is
            checked and described. digits: the bundled 8x8 images.
        out: Folder to create, on a disk or in a bucket. A folder that was written with the same options from the same
            files is returned unchanged; any other non-empty folder is refused, unless append is set. Not for parquet.
        input: File or folder to read, on a disk or in a bucket; not for digits.
        label: For csv, jsonl, hf and tfrecord: the column that becomes `label`; strings become class indices in sorted
            order. For images: the column of the file of labels. Not needed for hf and tfrecord if the column is called
            label. For webdataset: the key in each .json with an integer or text; not needed with .cls.
        labels: For images: a CSV file with a row for each image, on a disk or in a bucket. The column that names the
            most images identifies the image. A single other column becomes `label`, or `target` if it has fractions. Of
            several, the one in the option label becomes `label`, and the others keep their names. `none`: the images
            have no label. Default: the class is the folder of an image.
        targets: For csv, jsonl, hf, tfrecord, and images with labels: columns of numbers that together become the array
            column `target` of float32, in this order, such as 0 and 1 for each of several labels. Names are the ones
            before rename; integers above 2**24 are rounded.
        masks: For images: a folder with the mask of each image, with the same path except for the suffix, or with
            `_mask` at its end. The mask becomes the column `mask`, and images need no label.
        mask_values: With masks: the name of each value, such as `0=background,255=object`, or of each colour,
            `0/0/0=background,255/0/0=road`. The classes are numbered in this order; pixels with the name `ignore` get
            255. Default: the values, or the indices in a palette, are the classes.
        first_frame: For images: of an animation or a file with several pages, the first picture is stored, as PNG.
        images: For coco and voc: the folder of the images. Default: one of the usual folders of such data sets.
        segmentation: For coco and yolo: the outlines of objects become the column `mask`, classes of pixels with 0 for
            the background and 255 for crowds.
        delimiter: For csv: the one character between values, such as ; or | (\\t is a tab). Default: a comma, or the
            semicolon, tab or vertical bar that separates the first rows of the first file.
        column_names: For csv: names of the columns of files without a header line. A first line with exactly these
            names is a header line.
        encoding: For csv: utf-8, latin-1, cp1252 or utf-16.
        decimal: For csv: the decimal mark of numbers, a point or a comma. Default: a point, or the comma of all such
            numbers in the first rows where another character separates the values.
        null: For csv: one or several further spellings of a missing value, such as ?; they also apply to columns of
            text.
        ids: Columns with ids of users, products and so on, as text or integers, by their names before rename. Each
            value becomes a number from 0, in the sorted order of the values of all data sets. The source is read once
            more, and each distinct value is kept in memory.
        ids_of: With ids: a folder that was ingested with these ids; its numbers are used. A row with another value
            cannot be used.
        drop: Columns to leave out, by their names in the source, or in the data set if the source has no names.
        classes: For csv, jsonl, hf, tfrecord and webdataset: all classes of the label, in the order in which they are
            numbered from 0. Numeric classes are written as numbers, such as -1. Default: texts are numbered in sorted
            order; numbers stay unchanged.
        columns: For csv, jsonl, hf, tfrecord, webdataset, and images with labels: the columns to keep in addition to
            the label, by their names before rename; default: all. For webdataset, json.KEY makes a column KEY from this
            value of each .json, by the rules of jsonl.
        ragged: For jsonl, hf and tfrecord: columns of lists of any length, also empty ones, by their names in the
            source: lists of numbers, such as tokens, or of lists with one size, such as boxes (the size of the first
            non-empty list). Default: lists have the same shape in all rows.
        flatten: For jsonl: values of nested objects become columns, such as `a.b` for {"a": {"b": 1}}, at any depth.
        rename: New names of columns by their old names, such as {"y": "target"}.
        tokenizer: For csv, jsonl, hf and webdataset: a JSON file of the library `tokenizers` (tokenizer.json), on a
            disk or in a bucket, that turns texts into the column `tokens`, lists of int32. Its padding and truncation
            settings are ignored.
        text: With a tokenizer: the column of texts, which `tokens` replaces.
        end_of_text: With a tokenizer: the token that is added at the end of each text, such as <|endoftext|>.
        pack: With a tokenizer: number of tokens of a row. The texts of an input split are concatenated per data set and
            cut into blocks, so that each token is used once; the last block of an input split may be shorter. The data
            set then has no other columns.
        append: Adds the rows to the data set in `out`, if one exists there; it must have been written with the same
            options. A delivery that was added before is recognized. Rows are divided between `train` and `eval` as in
            the first ingest; with split_by, at the same value.
        new_classes: With append: classes that the data set lacks get the next numbers; otherwise they are refused.
        eval_fraction: Fraction of the rows, from 0 (none) to below 1, that goes to a data set `eval` instead of
            `train`. A keyed hash of the row's id decides, so the fraction is approximate, also in each class; see also
            group, split_by and stratify. If the source has `train` and `test`, `eval` is taken from `train`; a source
            with other data sets is not divided. Default: 0.2 for digits, exactly stratified; 0.1 for idx and numpy with
            a `test`; otherwise none.
        seed: Key of the hash of eval_fraction; split_by does not use it.
        group: With eval_fraction: a column, such as the patient. All rows with the same value go to the same data set,
            by a hash of the value. The column is kept, and the tabular tasks use it only if they name it.
        split_by: With eval_fraction: a column of dates, times (in text as ISO 8601) or numbers. The rows with the
            largest values go to `eval`; rows with the same value stay together. Times without an offset are in UTC. The
            source is read once more, and each distinct value takes 16 bytes of memory.
        stratify: With eval_fraction: `eval` has this fraction of each class of the label, rounded in each input split
            to a whole row. The rows are chosen at random.
        shuffle: Mixes the rows, so that training may read them window by window. false: rows keep the order of the
            source, for `data.shuffle: false`. Formats with separate image files are always mixed.
        check: For images, coco, voc, yolo, webdataset, tfrecord and hf: decodes each image now, so that a damaged one
            is refused now instead of during training.
        on_bad_row: fail stops at the first row that cannot be used. skip leaves it out and lists it with its reason in
            `_refused.jsonl`.
        max_bad_rows: Maximum rows that skip may leave out.
        shard_rows: Maximum rows of one Parquet file.
        split_bytes: Maximum bytes of an input split, which one task reads; a larger single file is one input split.
            Like shard_rows, the value decides where files begin, not how many tasks run.
    """

    source: Source
    out: str = ""
    input: str | None = None
    label: str | None = None
    labels: str | None = None
    targets: list[str] | None = None
    masks: str | None = None
    mask_values: str | None = None
    first_frame: bool = False
    images: str | None = None
    segmentation: bool = False
    delimiter: str | None = None
    column_names: list[str] | None = None
    encoding: Literal["utf-8", "latin-1", "cp1252", "utf-16"] = "utf-8"
    decimal: Literal[".", ","] | None = None
    null: str | list[str] | None = None
    ids: list[str] | None = None
    ids_of: str | None = None
    drop: list[str] | None = None
    classes: list[str] | None = None
    columns: list[str] | None = None
    ragged: list[str] | None = None
    flatten: bool = False
    rename: dict[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    text: str = "text"
    end_of_text: str | None = None
    pack: Annotated[int, NumberRange(ge=1, le=1 << 20)] | None = None
    append: bool = False
    new_classes: bool = False
    eval_fraction: Annotated[float, NumberRange(ge=0, lt=1)] | None = None
    seed: int = 0
    group: str | None = None
    split_by: str | None = None
    stratify: bool = False
    shuffle: bool = True
    check: bool = True
    on_bad_row: Literal["fail", "skip"] = "fail"
    max_bad_rows: NonNegativeInt = 100
    shard_rows: PositiveInt = 100_000
    split_bytes: PositiveInt = 256 << 20

    @property
    def kept_columns(self) -> frozenset[str] | None:
        """The columns that the options `columns` and `targets` name; None if all are kept."""
        return None if self.columns is None else frozenset([*self.columns, *(self.targets or ())])

    @property
    def limits(self) -> tuple[int, int, int]:
        """Maximum rows of a file, maximum rows of a row group, maximum bytes of a row group."""
        return self.shard_rows, _DIGITS_ROWS if self.source == "digits" else ROW_GROUP_ROWS, ROW_GROUP_BYTES


_OPTION = re.compile(r"--([a-z_]+)(?: (true|false|skip|fail|\d+|'[^']*'|\[[^\]]*\]))?")


@contextmanager
def python_spelling() -> Iterator[None]:
    """Writes the options in errors as a program gives them (`check=False`); messages have those of the command line."""
    try:
        yield
    except RayAppError as error:
        error.args = tuple(_to_python(part) if isinstance(part, str) else part for part in error.args)
        raise


def _to_python(text: str) -> str:
    names = {option.name for option in fields(IngestOptions)}
    values = {"true": "True", "false": "False", "skip": "'skip'", "fail": "'fail'"}

    def render(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in names:
            return match[0]
        if value is not None and value.startswith("'["):
            value = str(value.strip("'[]").split(", "))
        return name if value is None else f"{name}={values.get(value, value)}"

    return _OPTION.sub(render, text)


_ALTERNATIVES = {"label": " (rename a column with --rename '{NAME: label}')"}


def _is_delimiter(text: str) -> bool:
    r"""Returns whether a text is one ASCII character that may separate values, or `\t`.

    A command line passes `\t` for a tab.
    """
    return text == r"\t" or (len(text) == 1 and text.isascii() and text not in '"\r\n\0')


RULES = (
    Rule("new_classes", lambda o: not o.append, ", which needs --append true; set that, or leave new_classes out."),
    Rule("mask_values", lambda o: not o.masks, ", which needs --masks; set both."),
    *(
        Rule(
            name,
            lambda o: o.source == "images" and o.labels in (None, "none"),
            ", a column of a file of labels; name the file with --labels.",
        )
        for name in ("label", "columns", "targets")
    ),
    *(
        Rule(name, lambda o: o.pack is not None, ", but with pack the tokens are the only column; leave it out.")
        for name in ("ragged", "targets", "ids")
    ),
    Rule("ids_of", lambda o: not o.ids, ", which needs --ids; set --ids to the columns of ids."),
    Rule(
        "ids",
        lambda o: {*o.ids} & {"label", o.label, *(o.targets or ()), *(o.drop or ())},
        ", but one of them is the label, a target, or left out; name other columns.",
    ),
    *(
        Rule(name, lambda o: o.tokenizer is None, ", which needs --tokenizer; set both.")
        for name in ("text", "end_of_text", "pack")
    ),
    Rule("targets", lambda o: _has_repeated(o.targets), "; allowed are one or more names, each once."),
    Rule("targets", lambda o: o.label in o.targets, ", and label is {c.label}, one of them; remove it from one."),
    Rule("targets", lambda o: {*o.targets} & {*(o.drop or ())}, ", and drop has one of them; remove it from one."),
    Rule("targets", lambda o: {*o.targets} & {*o.rename}, ", and rename has one of them; remove it from one."),
    Rule(
        "delimiter",
        lambda o: not _is_delimiter(o.delimiter),
        r"; allowed is one ASCII character, such as ; or | or \t, but no quote and no line end.",
    ),
    Rule("delimiter", lambda o: o.delimiter == o.decimal, ", and so is decimal; use different characters."),
    Rule(
        "classes",
        lambda o: o.classes and _has_repeated(o.classes),
        "; allowed are names that are not empty, each once.",
    ),
    Rule("classes", lambda o: o.label is None, ", but label is not set; set it to the column of the label."),
    Rule("columns", lambda o: not o.columns, "; name at least one column to keep, or leave columns out to keep all."),
    Rule("column_names", lambda o: _has_repeated(o.column_names), "; allowed are one or more names, each once."),
    Rule(
        "group",
        lambda o: o.group in ("label", "row_id", o.label),
        ", which does not group rows; name another column.",
    ),
    Rule("split_by", lambda o: o.group, ", and group is {c.group}; rows can be divided by only one of them."),
    Rule(
        "shuffle",
        lambda o: o.pack or o.source in ("images", "coco", "voc", "yolo"),
        ", but separate image files and packed texts are always mixed; leave shuffle out.",
    ),
    Rule("stratify", lambda o: o.group or o.split_by, "; divide by one of stratify, group and split_by only."),
)
"""Combinations of options that are refused."""


def _has_repeated(names: list[str]) -> bool:
    """Returns whether names are none, not different, or one is empty."""
    return not names or len(set(names)) < len(names) or "" in names


def check_options(
    options: IngestOptions, formats: Mapping[str, FormatTraits], needs_output: bool = True
) -> FormatTraits:
    """Returns the traits of the format; raises ConfigError for an option that is not allowed, or does not fit others.

    Args:
        options: The options.
        formats: The traits of all formats by name.
        needs_output: Whether a format that is written needs `out`.
    """
    refuse(check_fields(options), "ingest")
    traits = formats[options.source]
    if traits.has_input != bool(options.input):
        needs = "needs an input; set it to a path" if traits.has_input else "reads no input; leave it out"
        raise ConfigError(f"input is {options.input!r}: source {options.source!r} {needs}.")
    if traits.has_output != bool(options.out) and (needs_output or options.out):
        needs = "needs a folder to create" if traits.has_output else "needs no conversion; leave the option out"
        raise ConfigError(f"out is {options.out!r}: source {options.source!r} {needs}.")
    if options.input and options.out and is_within(to_location(options.out), to_location(options.input)):
        raise ConfigError(f"out {options.out!r} lies in the input {options.input!r}; name a folder outside it.")
    _check_options_of_format(options, formats)
    refuse(find_broken_rules(options, RULES), "ingest")
    return traits


def _check_options_of_format(options: IngestOptions, formats: Mapping[str, FormatTraits]) -> None:
    """Raises ConfigError for an option that the format does not have."""
    defaults = IngestOptions(options.source)
    changed = {
        option.name: value
        for option in fields(options)
        if (value := getattr(options, option.name)) != getattr(defaults, option.name)
    }
    if not formats[options.source].has_output and (names := [name for name in changed if name != "input"]):
        raise ConfigError(
            f"{names[0]} is {changed[names[0]]!r}: source {options.source!r} needs no conversion and writes no files;"
            " leave the option out, or ingest these files with --source hf."
        )
    limited = frozenset[str]().union(*(traits.options for traits in formats.values()))
    for name in sorted(limited & changed.keys() - formats[options.source].options):
        allowed = [source for source, traits in formats.items() if name in traits.options]
        raise ConfigError(
            f"{name} is {changed[name]!r}, an option only of {', '.join(allowed)}; leave it out for"
            f" {options.source!r}{_ALTERNATIVES.get(name, '')}."
        )
