"""Nine kinds of conversations that chat templates treat differently."""

from __future__ import annotations

from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für <Ort> & Tag",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}},
}


def _turn(user: str, answer: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer, **more},
    ]


_SYSTEM = {"role": "system", "content": "Answer in words."}
_CALLING = [
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
_RESULT = {"role": "tool", "name": "get_weather", "content": '{"sky": "cloudless"}'}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "single turn": {"messages": _turn("What is 2 + 2?", "Four.")},
    "system": {"messages": [_SYSTEM, *_turn("What is 2 + 2?", "Four.")]},
    "several turns": {
        "messages": [_SYSTEM, *_turn("2 + 2?", "Four."), *_turn("And doubled?", "Eight.")]
    },
    "tool call": {"messages": _CALLING, "tools": TOOLS},
    "tool result": {
        "messages": [*_CALLING, _RESULT, {"role": "assistant", "content": "No clouds."}],
        "tools": TOOLS,
    },
    "reasoning": {
        "messages": [
            *_turn("2 + 2?", "Four.", reasoning_content="Count: one, two."),
            *_turn("And doubled?", "Eight.", reasoning_content="Four and four."),
        ]
    },
    "empty system": {"messages": [{"role": "system", "content": ""}, *_turn("Hi", "Hello.")]},
    "unicode": {"messages": _turn("<b>Über</b> & 日本 😀\n\n", "naïve\u2028\ttext 👩‍🚀 e\u0301 !")},
    "long": {"messages": [message for n in range(8) for message in _turn(f"Q{n}. " * 40, "A" * n)]},
}
