"""Generation answers: ids, lengths, streams, token-in token-out, errors."""

import json

from tests.conformance.server import Server, error_of
from tests.conformance.subjects import CONTEXT


def test_completion_carries_the_callers_request_id(server: Server) -> None:
    """The answer's id is made from X-Request-Id."""
    body = server.completion_body("hello", 3)
    reply = server._http.post("/v1/completions", json=body, headers={"X-Request-Id": "my-rid"})
    assert reply.json()["id"] == "cmpl-my-rid"


def test_equal_prompts_get_equal_greedy_answers(server: Server) -> None:
    """With the same weights the same prompt gives the same tokens."""
    first, second = (server.complete("hello world", 8) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["completion_tokens"] == 8


def test_several_prompts_are_answered_in_order(server: Server) -> None:
    """A list of prompts gives one choice each."""
    answer = server.ok("/v1/completions", server.completion_body("", 2) | {"prompt": ["a", "b"]})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


def test_stream_ends_with_usage_and_done(server: Server) -> None:
    """A stream has one event per token, then usage if asked for, then [DONE]."""
    body = server.completion_body("hello", 4, stream=True, stream_options={"include_usage": True})
    lines = [line for line in server.post("/v1/completions", body).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"


def test_chat_answers_as_the_assistant(server: Server) -> None:
    """A conversation gives one message."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = server.ok("/v1/chat/completions", body)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_tokens_in_tokens_out_says_which_weights_made_them(server: Server) -> None:
    """/inference/v1/generate labels spans of output tokens with the weight version."""
    server.ok("/update_weight_version", {"new_version": "span"})
    body = {
        "model": server.model,
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 3, "temperature": 0, "ignore_eos": True},
    }
    choice = server.ok("/inference/v1/generate", body)["choices"][0]
    assert len(choice["token_ids"]) == 3
    assert choice["weight_versions"] == [{"version": "span", "start": 0, "end": 3}]


def test_text_survives_tokenize_and_detokenize(server: Server) -> None:
    """Both directions agree."""
    tokens = server.ok("/tokenize", {"model": server.model, "prompt": "hello"})
    assert tokens["count"] == len(tokens["tokens"])
    back = server.ok("/detokenize", {"model": server.model, "tokens": tokens["tokens"]})
    assert back == {"prompt": "hello"}


def test_unknown_model_is_404(server: Server) -> None:
    """The error names the model and the field."""
    reply = server.post("/v1/completions", {"model": "nope", "prompt": "x"})
    assert "The model `nope` does not exist." in error_of(reply, 404)
    assert reply.json()["error"]["param"] == "model"


def test_too_long_a_prompt_is_400(server: Server) -> None:
    """A prompt over the context length is refused."""
    reply = server.post("/v1/completions", server.completion_body([5] * (CONTEXT + 1), 1))
    assert f"maximum context length is {CONTEXT} tokens" in error_of(reply, 400)
