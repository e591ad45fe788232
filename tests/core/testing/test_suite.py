from __future__ import annotations

from attnmux.core.testing import AttentionBackendTests, Candidate, fake_card, fake_platform


class TestFakeBackend(AttentionBackendTests):
    backend = Candidate(card=fake_card(), platform=fake_platform())
