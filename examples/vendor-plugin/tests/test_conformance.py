from attnmux.core.testing import AttentionBackendTests


class TestAcmePaged(AttentionBackendTests):
    backend = "acme_paged"
