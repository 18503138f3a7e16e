"""Chats as documents (prepare.py --chat): writes the messages of a record by the chat template of the tokenizer's
folder, and marks all tokens as context but those of the assistant's messages.
"""

import array
import functools
import hashlib
import json
import os
import re

from problems import BadInput, package_folder
from vocabulary import JsonTokenizer

CONTEXT = 1 << 31  # in a token of a shard with a loss mask (llmc/data/dataloader.h)
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_template(folder):
    """Returns the chat template of a model's folder and the names of its special tokens, as transformers finds them."""
    config, template = {}, os.path.join(folder, "chat_template.jinja")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if os.path.exists(path := os.path.join(folder, name)):
            with open(path, encoding="utf-8") as f:
                try:
                    config.update(json.load(f))
                except ValueError as e:
                    raise BadInput(f"{path}: is no JSON object: {e}") from None
    text = config.get("chat_template")
    if isinstance(text, list):  # several templates
        text = next((t["template"] for t in text if t["name"] == "default"), None)
    if os.path.exists(template):
        with open(template, encoding="utf-8") as f:
            text = f.read()
    if not text:
        raise BadInput(f"--chat: there is no {template}, and no \"chat_template\" in {path}; copy one of them there")
    names = {key: t["content"] if isinstance(t, dict) else t for key, t in config.items() if key.endswith("_token")}
    return text, {key: name for key, name in names.items() if isinstance(name, str)}


def compile_template(text):
    """As transformers does, but without strftime_now: shards must not depend on the day."""
    package_folder("jinja2", "--chat")
    import jinja2.ext
    import jinja2.sandbox

    def fail(words):
        raise jinja2.TemplateError(words)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    # {% generation %}, a tag of transformers around the assistant's text, is not needed here.
    for tag, plain in (("generation", "if true"), ("endgeneration", "endif")):
        text = re.sub(rf"(?<=\{{%)([-+]?\s*){tag}(?=\s*[-+]?%\}})", rf"\1{plain}", text)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as e:
        raise BadInput(f"--chat: the chat template is broken: {e}") from None


def check_messages(messages):
    if not isinstance(messages, list):
        raise BadInput("has no list of messages")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadInput(f"has a message {i} without a string \"content\"")
        if message.get("role") not in ROLES:
            raise BadInput(f"has a message {i} of the role {json.dumps(message.get('role'))}, not {', '.join(ROLES)}")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadInput("has no message of the assistant, so nothing in it would count; leave it out")


class ChatTokenizer(JsonTokenizer):
    masked = True

    def __init__(self, path, separator):
        super().__init__(path, separator)
        self.tokenizer.encode_special_tokens = False  # the template writes special tokens by their names
        text, self.names = read_template(os.path.dirname(os.path.abspath(path)))
        self.identity += hashlib.sha256(json.dumps([text, self.names]).encode()).hexdigest()
        self.template = compile_template(text)
        self.added = tuple(t["content"] for t in self.spec.get("added_tokens", []))

    def render(self, chat, count, prompt=False):
        """The text of the first `count` messages. prompt: and how an answer begins."""
        try:
            text = self.template.render(messages=chat["messages"][:count], tools=chat["tools"], documents=None,
                                        add_generation_prompt=prompt, **self.names)
            text.encode()
        except Exception as e:  # a template may fail in any way
            raise BadInput(f"cannot be written by the chat template: {e}") from None
        return text

    def spans(self, chat, whole):
        """Yields where each message of the assistant begins and ends in the text, with its end token if it has one."""
        for i, message in enumerate(chat["messages"]):
            if message["role"] != "assistant":
                continue
            begin, end = self.render(chat, i, prompt=True), self.render(chat, i + 1)
            if not end.startswith(begin) or not whole.startswith(end):
                raise BadInput(f"cannot be masked: the chat template does not write messages 1 to {i + 1} as the "
                               "beginning of the whole chat; write a chat_template.jinja that does")
            shown = end.rstrip()
            yield len(begin), len(shown if shown.endswith(self.added) else end)

    def encode_chat(self, chat):
        check_messages(chat["messages"])
        whole = self.render(chat, None)
        counts = bytearray(len(whole))  # for each character
        for begin, end in self.spans(chat, whole):
            counts[begin:end] = b"\1" * (end - begin)
        encoding = self.tokenizer.encode_batch([whole], add_special_tokens=False)[0]
        ids = array.array("I", [i if 1 in counts[a:b] else i | CONTEXT
                                for i, (a, b) in zip(encoding.ids, encoding.offsets)])
        first = self.separator | CONTEXT
        return ids if ids and ids[0] == first else array.array("I", [first]) + ids  # Llama 3's template writes it
