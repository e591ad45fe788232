from attnmux.testing import AttentionBackendTests


class TestAcmePaged(AttentionBackendTests):
    backend = "acme_paged"
