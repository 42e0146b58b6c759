# SPDX-License-Identifier: Apache-2.0
"""The live stream of a device that has streams by name alone."""

from contextlib import contextmanager


class LiveStream:
    """`stream` is the live one's name."""

    stream = ""

    def current_stream(self):
        return self.stream

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before
