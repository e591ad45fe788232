"""The public names of the reference, each with its module."""

from attnmux.testing.reference.dense import attention as attention
from attnmux.testing.reference.dense import dense_attention as dense_attention
from attnmux.testing.reference.linear import convolution as convolution
from attnmux.testing.reference.linear import recurrence as recurrence
