"""Statuses of the API server become errors that callers act upon."""

import pytest

from agent.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiGone,
    ApiInvalid,
    ApiNotFound,
    ApiThrottled,
)
from agent.kube.client import error_frame, refused, seconds


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ApiError),
        (401, ApiForbidden),
        (403, ApiForbidden),
        (404, ApiNotFound),
        (409, ApiConflict),
        (410, ApiGone),
        (422, ApiInvalid),
        (429, ApiThrottled),
        (500, ApiError),
        (503, ApiError),
    ],
)
def test_a_status_has_its_class(status: int, kind: type[ApiError]):
    error = refused("patch nodes (/x)", status)

    assert (kind, status) == (type(error), error.status)


def test_the_text_says_what_was_asked_and_what_was_answered():
    error = refused("patch nodes (/x)", 409, b'{"kind":"Status","message":"try again"}')

    assert "patch nodes (/x): the API server answered 409: try again" == str(error)


def test_a_missing_right_is_named_with_the_mend():
    error = refused("patch nodes (/x)", 403, b'{"message":"no"}')

    assert str(error).endswith("answered 403: no; grant this right to the agent's identity")


@pytest.mark.parametrize(
    "body", [b"<html>\xff bad\n gateway</html>" * 99, b"[1]", b'{"message":7}']
)
def test_any_body_gives_one_short_line(body: bytes):
    text = str(refused("x", 502, body))

    assert "\n" not in text
    assert 400 > len(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("999999", 3600.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("\u0667", None),
        ("", None),
        (None, None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds(text: str | None, expected: float | None):
    assert expected == seconds(text)


def test_an_unavailable_server_may_say_when_to_come_back():
    assert 5.0 == refused("x", 503, b"", "5").retry_after


@pytest.mark.parametrize(
    ("obj", "kind", "status"),
    [
        ({"code": 410, "message": "too old"}, ApiGone, 410),
        ({"code": 500}, ApiError, 500),
        ({"code": "410"}, ApiError, 0),
        ({}, ApiError, 0),
    ],
)
def test_an_error_frame_is_an_answer_too(obj: dict[str, object], kind: type[ApiError], status: int):
    error = error_frame("watch pods (/x)", obj)

    assert (kind, status) == (type(error), error.status)
