from __future__ import annotations

import pytest

from attnmux.core import InvalidInput, Policy


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backend": 5}, "policy, backend: expected a backend's name, or None, got 5"),
        ({"mm_backend": ["a"]}, "policy, mm_backend: expected a backend's name"),
        (
            {"prefer": "flash"},
            "policy, prefer: expected several names, as a tuple of them, got 'flash'",
        ),
        ({"allow": "flash"}, "policy, allow: expected several names"),
        ({"deny": None}, "policy, deny: expected several names, as a tuple of them, got None"),
        ({"deny": (1,)}, "policy, deny: expected several names"),
        ({"without": "torch"}, "policy, without: expected several names"),
        ({"options": 5}, "policy, options: expected a mapping"),
        ({"options": {"a": 5}}, "policy, options of a: expected a mapping"),
        ({"failed": ["fake/a"]}, "policy, failed: expected a mapping"),
        ({"origins": {"backend": "model"}}, "each by user, env or config, got 'backend=model'"),
        ({"origins": {"bakend": "env"}}, "expected prefill_backend, backend, decode_backend, mm_"),
    ],
)
def test_values_of_other_types_are_refused(given, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        Policy(**given)
    assert said in str(caught.value)


def test_lists_and_mappings_are_copied() -> None:
    deny, failed = ["a"], {}
    policy = Policy(deny=deny, failed=failed, without=["torch", "torch"])
    deny.append("b")
    failed["fake/a"] = "never"
    assert (policy.deny, dict(policy.failed)) == (("a",), {})
    assert policy.without == {"torch"}
    assert policy == Policy(deny=("a",), without=frozenset({"torch"}))
