"""Reads the log.jsonl of a run. A line that cannot be right raises Damaged, with its file and number, unless it is
a half-written last line.

A resumed run appends a settings record. It may repeat steps, because its checkpoint may be older than the log's last
line. Then the earlier records of these and later steps are dropped; earlier summaries are kept.
"""
import array
import bisect
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
from pathlib import Path

import numpy as np

import sweep_folder
from sweep_folder import NUMBER, NUMBER_OR_NULL, OBJECT, TEXT, Damaged, check_fields, clean

WARMUP_STEPS = 10  # SUMMARY_WARMUP_STEPS of llmc/run/logger.h
STALL = 5          # a step that takes more than this many medians was stopped from outside: it has no time of its own
LARGEST = {"loss": 1e6, "ms": 1e9}  # larger ones are damage: a loss starts near 12, and 1e9 ms are 11 days

# Fields that every record of a type has, in addition to those of sweep_folder.FIELDS.
FIELDS = {
    "step": {"step": NUMBER, "loss": NUMBER_OR_NULL, "lr": NUMBER_OR_NULL, "ms": NUMBER,
             "tokens_per_second": NUMBER_OR_NULL, "memory_bytes": NUMBER_OR_NULL},
    "validation": {"step": NUMBER, "loss": NUMBER_OR_NULL},
    "save": {"step": NUMBER}, "profile": {"step": NUMBER}, "fp8_audit": {"step": NUMBER},
}
# Fields that a record may lack: some machines cannot measure them, and older versions did not write them.
OPTIONAL = {
    "step": dict.fromkeys(("data_ms", "communication_ms", "optimizer_ms", "joules", "mfu", "sol", "tflops_per_gpu",
                           "norm", "skipped"), NUMBER_OR_NULL),
    "validation": {"seconds": NUMBER_OR_NULL}, "save": {"seconds": NUMBER_OR_NULL, "error": TEXT},
    "fp8_audit": {"flushed": NUMBER_OR_NULL, "saturated": NUMBER_OR_NULL},
    "settings": {"model_flops_per_token": NUMBER_OR_NULL, "peak_bf16_flops": NUMBER_OR_NULL, "host": TEXT,
                 "memory": OBJECT, "training_fingerprint": TEXT, "validation_fingerprint": TEXT,
                 "training_sequences": NUMBER, "training_tokens": NUMBER, "first_sample": NUMBER},
    "summary": {"seconds": OBJECT, "goodput": NUMBER_OR_NULL, "kwh": NUMBER_OR_NULL,
                "joules_per_token": NUMBER_OR_NULL}}
PER_GPU = ("watts", "sm_mhz", "celsius")
LISTS = {**dict.fromkeys((*PER_GPU, "losses"), NUMBER_OR_NULL), "throttle": TEXT}
NAN = np.float64(math.nan).tobytes()
BLOCK = 1 << 18  # bytes of a log that are parsed at once


def clean_all(value):
    """The value of a JSON text with sweep_folder.clean's "?" for characters that a terminal or page might obey."""
    if isinstance(value, dict):
        return {clean(key): clean_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_all(item) for item in value]
    return clean(value) if isinstance(value, str) else value


class Steps:
    """Step records in columns, so that a million of them take some 200 MB. A column is named by its field, or by
    (field, GPU) if the field has a number for each GPU."""

    def __init__(self):
        self.count, self.texts, self.known = 0, [], {}
        self.numbers = {key: array.array("d") for key in (*FIELDS["step"], *OPTIONAL["step"])}

    def __len__(self):
        return self.count

    def append(self, record):
        columns = {key: [record.get(key)] for key in self.numbers if isinstance(key, str)}
        columns |= {(key, gpu): [value] for key in PER_GPU for gpu, value in enumerate(record.get(key, ()))}
        self.extend(1, {key: np.array(column, dtype=np.float64) for key, column in columns.items()},
                    [tuple(record.get("throttle", ()))])

    def extend(self, count, columns, texts):
        """Appends `count` steps: arrays of their numbers, NaN where a step has none, and their tuples of texts."""
        for key in columns.keys() - self.numbers.keys():
            self.numbers[key] = array.array("d", [math.nan]) * self.count
        for key, column in self.numbers.items():
            column.frombytes(columns[key].tobytes() if key in columns else NAN * count)
        self.texts += [self.known.setdefault(one, one) for one in texts]
        self.count += count

    def drop_from(self, step):
        """Forgets the records from this step on."""
        self.count = bisect.bisect_left(self.numbers["step"], step) if self.count else 0
        for column in (*self.numbers.values(), self.texts):
            del column[self.count:]

    def column(self, key):
        """The values of all steps: None where a step has none. "throttle" has a tuple of texts for each."""
        if key == "throttle":
            return self.texts
        values = self.array(key)
        if key == "step":
            return values.astype(np.int64).tolist()
        values, missing = values.astype(object), np.isnan(values)
        values[missing] = None
        return values.tolist()

    def array(self, key):
        """The numbers of all steps, NaN where a step has none."""
        values = self.numbers.get(key)
        return np.full(self.count, np.nan) if values is None else np.frombuffer(values[:])


@dataclasses.dataclass
class Run:
    """A run. `starts`: its settings records, one for each start. `steps` to `summaries`: its records of other types,
    each list in the order of the log."""
    name: str
    folder: Path
    starts: list = dataclasses.field(default_factory=list)
    resumed_at: list = dataclasses.field(default_factory=list)  # the first step of each start but the first one
    steps: Steps = dataclasses.field(default_factory=Steps)
    validations: list = dataclasses.field(default_factory=list)
    saves: list = dataclasses.field(default_factory=list)
    audits: list = dataclasses.field(default_factory=list)
    profiles: list = dataclasses.field(default_factory=list)
    summaries: list = dataclasses.field(default_factory=list)
    repeated: int = 0        # steps that a resumed run made again
    half_written: bool = False
    running: bool = False
    ended: bool = False      # the last start wrote its summary
    risen: bool = False      # and it says that the run diverged: its last loss is finite, but far above its lowest
    against: str = "bf16"    # the recipe that its verdict compares with
    recipe: str = ""         # as a verdict against an FP8 recipe names it
    planned: str = ""        # as any verdict names it

    @property
    def settings(self):
        return self.starts[-1]

    def option(self, name, default=None):
        return self.settings["settings"].get(name, default)

    @property
    def last_step(self):
        return int(self.steps.numbers["step"][-1]) if self.steps else 0

    @property
    def first_step(self):
        return int(self.steps.numbers["step"][0]) if self.steps else 0

    @property
    def stretches(self):
        """[(last step, recipe, rounding seed)] of a run, oldest first: as a branched run's settings record tells it,
        and at last what the run has trained with itself. That record lacks options of FP8 recipes; all stretches of an
        arm but the first, the trunk's, have the arm's recipe."""
        before = self.starts[0].get("branches") or []
        all_of = before + [{"step": self.num_steps, "precision": self.option("precision"),
                            "fp8_recipe": self.option("fp8-recipe"), "rounding_seed": self.rounding_seed}]
        recipes = [f"fp8:{s.get('fp8_recipe')}" if s["precision"] == "fp8" else s["precision"] for s in all_of]
        if self.recipe:
            recipes = [self.against] * bool(before) + [self.recipe] * max(len(before), 1)
        return [(int(s["step"]), recipe, s["rounding_seed"]) for s, recipe in zip(all_of, recipes)]

    @property
    def is_base(self):
        """True if it has the recipe that others are compared with."""
        return self.stretches[-1][1] == self.against

    def tokens_at(self, step):
        """Tokens up to a step, those of the stretches before too, whose steps may have been larger or smaller."""
        before = self.starts[0].get("first_sample")
        before = (self.first_step - 1) * self.tokens_per_step if before is None else int(before) * self.length
        return before + (step - self.first_step + 1) * self.tokens_per_step

    @property
    def num_steps(self):
        return int(self.option("num-steps"))

    @property
    def complete(self):
        """True if the log has the step --num-steps. Earlier ones may be missing."""
        return self.last_step >= self.num_steps

    @property
    def diverged(self):
        """The first step whose loss is not finite, or None."""
        lost = np.flatnonzero(np.isnan(self.array("loss")))
        return int(self.array("step")[lost[0]]) if len(lost) else None

    @property
    def missing(self):
        """The first step that the log lacks although it has a later one, or None. That of a branched run begins after
        the last step of the stretch before it."""
        first = 1 + (self.stretches[-2][0] if len(self.stretches) > 1 else 0)
        gaps = np.flatnonzero(self.array("step") != first + np.arange(len(self.steps)))
        return first + int(gaps[0]) if len(gaps) else None

    @property
    def seed(self):
        return self.option("seed")

    @property
    def rounding_seed(self):
        return self.option("rounding-seed", self.seed)

    @property
    def gpus(self):
        return int(self.settings["world_size"])

    @property
    def place(self):
        """Model, sequence length and GPUs (ranks of the CPU trainer) in words."""
        unit = "rank" if self.settings["program"] == "train_fp8" else "GPU"
        return f"{self.settings['model']}, T {self.length}, {self.gpus} {unit}{'' if self.gpus == 1 else 's'}"

    @property
    def length(self):
        return int(self.option("sequence-length"))

    @property
    def tokens_per_step(self):
        return self.gpus * self.length * int(self.option("batch-size")) * int(self.option("grad-accumulation-steps"))

    @property
    def repeats_data(self):
        """True if its steps take more sequences than the data has; None if the log does not say how many it has."""
        sequences = self.settings.get("training_sequences")
        return None if not sequences else self.tokens_per_step // self.length * self.num_steps > sequences

    def state(self):
        """How far the run is, in words."""
        if self.complete and self.ended:
            words = f"done, {self.last_step} steps"
        elif self.running:
            words = f"running, step {self.last_step} of {self.num_steps}"
        elif self.ended:
            words = f"stopped after step {self.last_step} of {self.num_steps}"
        else:
            words = f"ended without a summary after step {self.last_step} of {self.num_steps}"
        return words + (f"; loss not finite at step {self.diverged}" if self.diverged else "; diverged" * self.risen)

    def column(self, key):
        """The values of a field, one a step, in order; None where a step has none. `key`: see Steps."""
        return self.steps.column(key)

    def array(self, key):
        """The numbers of a field in all steps, NaN where a step has none."""
        return self.steps.array(key)

    def has(self, key):
        return any(self.column(key)) if key == "throttle" else bool((~np.isnan(self.array(key))).any())

    def values(self, key):
        """The numbers of a field, one a step; None if a step lacks it."""
        return None if not self.steps or np.isnan(self.array(key)).any() else self.column(key)

    @functools.cached_property
    def stalls(self):
        """{place in the list of steps: ms} of steps above STALL medians."""
        times = self.array("ms")
        return {int(i): float(times[i]) for i in np.flatnonzero(times > STALL * np.median(times))}

    def costs(self, key):
        """The values of a field ("ms", "joules" or a part of ms), a number each step, with the median instead of those
        of stalled steps; None if a step lacks it."""
        values = self.values(key)
        if values is not None and self.stalls:
            values, median = list(values), float(np.median(values))
            for i in self.stalls:
                values[i] = median
        return values

    def stall_words(self):
        """What is left out of time and energy, in words; "" if nothing is."""
        if not self.stalls:
            return ""
        most = f"{'' if len(self.stalls) == 1 else 'up to '}{max(self.stalls.values()) / 1000:.3g} s"
        return (f"{len(self.stalls)} step{'s' * (len(self.stalls) > 1)} of {self.name} took {most}, above {STALL} "
                "times the median; left out of time and energy")

    @property
    def median_ms(self):
        """The time of the median step, without the first WARMUP_STEPS, or the first half of a short run."""
        return float(np.median(self.array("ms")[min(WARMUP_STEPS, len(self.steps) // 2):]))

    @property
    def median_speed(self):
        """Tokens per second of all ranks in the median step."""
        return self.tokens_per_step / self.median_ms * 1000

    @property
    def last_losses(self):
        """The last 20 finite training losses."""
        return [loss for loss in self.column("loss") if loss is not None][-20:]


def check_each(values, kind, name):
    if not isinstance(values, list) or not all(sweep_folder.is_a(kind, value) for value in values):
        raise Damaged(f"\"{name}\" is not a list with {kind} each")


def check_objects(values, fields, name):
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Damaged(f"{name} is not a list of objects")
    for value in values:
        check_fields(value, fields)


def check_lists(record):
    """Checks fields that hold lists or objects, and those of settings records."""
    for name, kind in LISTS.items():
        if name in record:
            check_each(record[name], kind, name)
    if any(abs(value or 0) > LARGEST["loss"] for value in record.get("losses", ())):
        raise Damaged(f"one of \"losses\" is above {LARGEST['loss']:g}")
    if record["type"] == "summary":
        check_each(list(record.get("seconds", {}).values()), NUMBER_OR_NULL, "seconds")
    if record["type"] == "profile":
        check_each(record.get("parts"), OBJECT, "parts")
        for part in record["parts"]:
            check_fields({"kind": "other", "speed_of_light_ms": None, **part},
                         {"name": TEXT, "ms": NUMBER, "kind": TEXT, "speed_of_light_ms": NUMBER_OR_NULL})
    if record["type"] == "settings":
        check_settings(record)


def check_settings(record):
    check_fields(record["settings"], {"precision": TEXT, "seed": NUMBER})
    branches, gemms = record.get("branches") or [], record.get("gemms", [])
    check_objects(branches, {"step": NUMBER, "precision": TEXT, "rounding_seed": NUMBER}, "\"branches\"")
    steps = [branch["step"] for branch in branches]
    if steps != sorted(set(steps)) or any(step < 1 or step != int(step) for step in steps):
        raise Damaged("the steps of \"branches\" are not whole numbers that grow")
    counts = {key: record["settings"][key] for key in sweep_folder.OPTIONS} | {"world_size": record["world_size"]}
    for key, value in counts.items():
        if value != int(value) or value < 1:
            raise Damaged(f"\"{key}\" is not a whole number above 0")
    memory = {"other_bytes": None, "groups": [], **record.get("memory", {})}
    check_fields(memory, {"other_bytes": NUMBER_OR_NULL})
    check_objects(memory["groups"], {"name": TEXT, "bytes": NUMBER}, "\"groups\" of \"memory\"")
    check_objects(gemms, {"linear": TEXT, "gemm": TEXT}, "\"gemms\"")
    for gemm in gemms:
        layers = gemm.get("layers")
        if not isinstance(layers, list) or not all(isinstance(layer, int) and 0 <= layer < 4096 for layer in layers):
            raise Damaged("the \"layers\" of a GEMM are not numbers of layers")


def read_record(line):
    record = sweep_folder.read_line(line)
    if b"\\" in line or b"\x7f" in line or not line.isascii():  # no other line can hold a control character
        record = clean_all(record)
    kind = record["type"]
    check_fields(record, FIELDS.get(kind, {}))
    if "step" in FIELDS.get(kind, {}):
        if record["step"] != int(record["step"]) or record["step"] < 1:
            raise Damaged("\"step\" is not a step's number")
        record["step"], record["skipped"] = int(record["step"]), int(record.get("skipped") is True)
    check_fields(record, {key: of for key, of in OPTIONAL.get(kind, {}).items() if key in record})
    if kind == "step" and record["ms"] <= 0:
        raise Damaged("\"ms\" is not above 0")
    for key, most in LARGEST.items() if kind in ("step", "validation") else ():
        if abs(record.get(key) or 0) > most:
            raise Damaged(f"\"{key}\" is {record[key]:.3g}, above {most:g}")
    if kind == "fp8_audit" and (record["layer"] != int(record["layer"]) or record["layer"] < 0):
        raise Damaged("\"layer\" is not a layer's number")
    check_lists(record)
    return record


def numbers_of(values, kind, most):
    """The array of a column, NaN instead of None. ValueError if a value is not of this kind, or above `most`."""
    missing = values.count(None)
    if not set(map(type, values)) <= {int, float, type(None)} or missing and kind != NUMBER_OR_NULL:
        raise ValueError
    numbers = np.array(values, dtype=np.float64)
    if np.count_nonzero(np.abs(numbers) <= most) + missing != len(values):
        raise ValueError
    return numbers


def values_of(lines):
    """{field: its values} of lines that are plain records: of equal fields in equal order, and without a character that
    clean might replace. ValueError if they are not."""
    text = b",".join(lines)
    if b"\\" in text or b"\x7f" in text or not text.isascii():
        raise ValueError
    records = json.loads(b"[" + text + b"]")
    keys = tuple(records[0])
    if len(records) != len(lines) or not all(map(keys.__eq__, map(tuple, records))):
        raise ValueError
    return dict(zip(keys, zip(*map(dict.values, records))))


def columns_of(values):
    """Arguments of Steps.extend. ValueError or TypeError if a field of `values` is not as read_record wants it."""
    count = len(values["step"])
    columns = {"skipped": np.array([value is True for value in values.get("skipped", [False] * count)], np.float64)}
    kinds = OPTIONAL["step"] | FIELDS["step"]
    for key, column in values.items():
        if key in (*PER_GPU, "throttle") and set(map(type, column)) != {list}:
            raise ValueError
        if key in PER_GPU:
            of_gpus = enumerate(zip(*column, strict=True))
            columns |= {(key, gpu): numbers_of(one, NUMBER_OR_NULL, sweep_folder.LARGEST) for gpu, one in of_gpus}
        elif key == "throttle":
            if not {type(text) for of in column for text in of} <= {str}:
                raise ValueError
        elif key in kinds and key != "skipped":
            columns[key] = numbers_of(column, kinds[key], LARGEST.get(key, sweep_folder.LARGEST))
        elif not set(map(type, column)) <= {int, float, str, bool, type(None)}:
            raise ValueError
    steps = columns["step"]
    if set(values["type"]) != {"step"} or not FIELDS["step"].keys() <= columns.keys() or columns["ms"].min() <= 0 \
            or steps[0] < 1 or (steps % 1).any() or (np.diff(steps) <= 0).any():
        raise ValueError
    return count, columns, list(map(tuple, values.get("throttle", [()] * count)))


def take_steps(run, lines):
    """Adds lines that are plain records of the steps that follow, and returns True; else does nothing, and read_record
    finds what is wrong with one. Logs of a million steps take a third of its time in this way."""
    if len(run.resumed_at) < len(run.starts) - 1 or not run.starts or not lines[-1].endswith(b"\n"):
        return False
    try:
        count, columns, texts = columns_of(values_of(lines))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False
    if columns["step"][0] <= run.last_step:
        return False
    run.steps.extend(count, columns, texts)
    return True


def read_lines(path, run):
    """Yields (number, line) of a log, but not the lines that take_steps has added."""
    number = 0
    with open(path, "rb") as file:
        while lines := file.readlines(BLOCK):
            for is_step, group in itertools.groupby(lines, lambda line: line.startswith(b'{"type": "step"')):
                group = list(group)
                if not is_step or not take_steps(run, group):
                    yield from enumerate(group, number + 1)
                number += len(group)


def read_records(path, run):
    """Yields the records of a log, but not those that take_steps has added. Sets run.half_written if the last line is
    half-written; it has no record then."""
    for number, line in read_lines(path, run):
        if not line.endswith(b"\n"):
            try:
                json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                run.half_written = True
                return
        try:
            yield read_record(line)
        except Damaged as reason:
            raise Damaged(f"{path}, line {number}: {reason}") from None


def is_locked(folder):
    """True if a trainer on this machine works in the folder: it locks the folder until it ends."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(fd)


def drop_from(run, step):
    """Forgets steps from this one on, and what happened after them: a resumed run makes them again."""
    before = len(run.steps)
    run.steps.drop_from(step)
    for name in ("validations", "saves", "audits", "profiles"):
        setattr(run, name, [record for record in getattr(run, name) if record["step"] < step])
    run.repeated += before - len(run.steps)


def add(run, record, path):
    kind = record["type"]
    run.risen = kind == "summary" and record.get("diverged") is True
    if kind == "settings":
        run.starts.append(record)
        run.ended = False
        return
    run.ended = run.ended or kind == "summary"
    if kind == "step":
        if len(run.resumed_at) < len(run.starts) - 1:
            run.resumed_at += [record["step"]] * (len(run.starts) - 1 - len(run.resumed_at))
            drop_from(run, record["step"])
        elif record["step"] <= run.last_step:
            raise Damaged(f"{path}: step {record['step']} follows step {run.last_step} without a settings record")
    lists = {"step": run.steps, "validation": run.validations, "save": run.saves, "fp8_audit": run.audits,
             "profile": run.profiles, "summary": run.summaries}
    if kind in lists:
        lists[kind].append(record)


def read_run(folder, name):
    """Reads FOLDER/log.jsonl. Raises Damaged or OSError."""
    path = Path(folder, "log.jsonl")
    run = Run(clean(name), Path(folder), running=is_locked(folder))
    for record in read_records(path, run):
        if not run.starts and record["type"] != "settings":
            raise Damaged(f"{path}, line 1: the first record is not of type settings")
        add(run, record, path)
    if not run.starts:
        raise Damaged(f"{path}: it has no whole line yet")
    return run
