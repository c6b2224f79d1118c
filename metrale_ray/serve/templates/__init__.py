# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chat templates: conversations become text in a limited process of their own, and the text becomes token ids."""
