"""SGLang's own table of slots, used in place."""

from __future__ import annotations

import torch

from attnmux.core import InvalidInput, RequestTable


class ForeignRequestTable(RequestTable):
    """An engine's own table of slots, used in place. The engine hands out its rows."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        """req_to_token: [rows, max_context_len] int32; row 0 belongs to padding.

        Raises InvalidInput for another dtype or shape.
        """
        if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32 or len(req_to_token) < 2:
            expected = "torch.int32 of shape (rows of requests + 1, max_context_len)"
            raise InvalidInput(
                "req_to_token",
                got=f"{req_to_token.dtype} of shape {tuple(req_to_token.shape)}",
                expected=expected,
            )
        super().__init__(req_to_token.shape[0] - 1, req_to_token.shape[1], req_to_token.device)
        self._req_to_token = req_to_token
