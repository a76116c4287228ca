"""The two ends of one ``nccl`` link: who may send when, and what is taken of what arrives.

A producer's end and a consumer's share a few words of the consumer's memory, the **mailbox**:

1. *Header first.* The producer writes a message's number and the slots that it carries, then pushes
   the descriptors and rings the bell. It has at most one message under way; what does not fit, or
   comes meanwhile, is not sent: the row has it.
2. *Credit.* The consumer, woken by the bell, posts its receive for the announced message, and only
   then stores the number as granted. The producer's thread sends when it sees that.
3. The consumer's device copies each record of the message into its inbox and announces it in the
   notices, exactly as a producer with ``cuda_ipc`` would have; but only if the transfer was over
   before any abort began. **Nothing is taken from an aborted transfer.**

So no kernel ever waits for a message that nobody has announced, and the order of operations is the
same on both sides because there is only one. Each end has a thread; the worker's own never waits.

The first send of a pair takes most of a second; :meth:`_End._connect` sends one for nothing.
Knows no batons.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from trserve.ipc.device.api import DeviceApi, Forward, sync
from trserve.ipc.device.communicator import MESSAGE_BYTES, Guarded
from trserve.ipc.device.inbox import RECORD_BYTES, Suffix, encode, next_seq
from trserve.ipc.device.medium import Inbox
from trserve.ipc.fence import load_fence, store_fence

log = logging.getLogger(__name__)

RECORDS: Final = MESSAGE_BYTES // RECORD_BYTES
ANNOUNCED, COUNT, SLOTS = 0, 1, 2
GRANTED: Final = 16  # on a line of its own: the other side's to write
MAILBOX_WORDS: Final = 24
_BELT_S: Final = 1.0
_FORWARD_TIMEOUT_S: Final = 1.0
_WARM_UP: Final = bytes(MESSAGE_BYTES)


class _End:
    """A thread that joins a communicator, warms it up and then works when it is woken."""

    def __init__(
        self,
        connect: Callable[[], Guarded],
        mailbox: memoryview,
        peer: int,
    ) -> None:
        self.mailbox = mailbox
        self.is_up = False
        self.guarded: Guarded | None = None
        self._peer = peer
        self._closed = False
        self._wake = threading.Event()
        threading.Thread(target=self._run, args=(connect,), name="nccl-link", daemon=True).start()

    def close(self) -> None:
        """Give the communicator up; the thread ends by itself."""
        self._closed, self.is_up = True, False
        if self.guarded is not None:
            self.guarded.abort()
        self._wake.set()

    def _run(self, connect: Callable[[], Guarded]) -> None:
        try:
            self.guarded = connect()
            self.is_up = self.guarded.run(self._warm_up) and not self._closed
            while self.is_up:
                self._wake.wait(_BELT_S)
                self._wake.clear()
                self.is_up = self.work(self.guarded) and not self._closed
        except Exception as error:  # also KeyError: CuPy knows not all of NCCL's codes
            log.warning("link nccl to worker %d: %s", self._peer, error)
        self.is_up = False
        if self.guarded is not None:
            self.guarded.abort()
        if not self._closed:
            log.warning(
                "link nccl to worker %d is down until one of the two restarts; its tokens go "
                "through the slab",
                self._peer,
            )

    def _warm_up(self) -> None:
        raise NotImplementedError

    def work(self, guarded: Guarded) -> bool:
        """Do what was asked for; False if the communicator was aborted."""
        raise NotImplementedError


class SendingEnd(_End):
    """The producer's, rank 0.

    Attributes:
        sent: suffixes whose message arrived.
    """

    def __init__(
        self, connect: Callable[[], Guarded], mailbox: memoryview, peer: int, epoch: int
    ) -> None:
        self._epoch = epoch
        self._seq = self._number = 0
        self._message: bytes | None = None
        self._count = self.sent = 0
        super().__init__(connect, mailbox, peer)

    @property
    def is_busy(self) -> bool:
        """Whether a message is under way."""
        return self._message is not None

    def offer(self, suffixes: Sequence[Suffix]) -> bool:
        """Announce a message of the first of ``suffixes``; False if one is under way."""
        if not self.is_up or self.is_busy:
            return False
        suffixes = suffixes[:RECORDS]
        records = []
        for suffix in suffixes:
            self._seq = next_seq(self._seq, self._epoch)
            records.append(encode(suffix, self._seq, self._epoch).ljust(RECORD_BYTES, b"\0"))
        self._number = next_seq(self._number, self._epoch)
        self._count = len(records)
        self._announce([suffix.slot for suffix in suffixes])
        self._message = b"".join(records).ljust(MESSAGE_BYTES, b"\0")
        self._wake.set()
        return True

    def _announce(self, slots: Sequence[int]) -> None:
        words = self.mailbox
        words[COUNT] = len(slots)
        for index, slot in enumerate(slots):
            words[SLOTS + index] = slot
        store_fence()
        words[ANNOUNCED] = self._number

    def _warm_up(self) -> None:
        assert self.guarded is not None
        self.guarded.communicator.send(_WARM_UP)

    def work(self, guarded: Guarded) -> bool:
        """Send the message once its receive is posted."""
        message = self._message
        if message is None:
            return not guarded.is_aborted
        done = guarded.run(lambda: guarded.communicator.send(message), self._is_granted)
        self.sent += self._count * done
        self._message = None
        return done

    def _is_granted(self) -> bool:
        return bool(self.mailbox[GRANTED] == self._number)


class ReceivingEnd(_End):
    """The consumer's, rank 1.

    Args:
        notices: device pointer of the inbox's notices.

    Attributes:
        received: records that were copied into the inbox.
    """

    def __init__(
        self,
        connect: Callable[[], Guarded],
        mailbox: memoryview,
        producer: int,
        api: DeviceApi,
        inbox: Inbox,
        notices: int,
    ) -> None:
        self._api = api
        self._inbox = inbox
        self._notices = notices
        self._seen = mailbox[ANNOUNCED]
        self.received = 0
        super().__init__(connect, mailbox, producer)

    def look(self) -> None:
        """Wake the thread if a message was announced; for whoever drains the descriptors."""
        if self.mailbox[ANNOUNCED] != self._seen:
            self._wake.set()

    def _warm_up(self) -> None:
        assert self.guarded is not None
        self.guarded.communicator.receive()

    def work(self, guarded: Guarded) -> bool:
        """Take in what was announced."""
        words = self.mailbox
        number = words[ANNOUNCED]
        if number == self._seen:
            return not guarded.is_aborted
        load_fence()  # count and slots were stored before the number
        slots = words[SLOTS : SLOTS + words[COUNT]].tolist()
        self._seen = number

        def post() -> None:
            guarded.communicator.receive()
            store_fence()
            words[GRANTED] = number

        if not guarded.run(post):
            return False
        self._forward(guarded.communicator.buffer, slots)
        return True

    def _forward(self, message: int, slots: Sequence[int]) -> None:
        layout = self._inbox.layout
        forwards = [
            Forward(
                message + RECORD_BYTES * index,
                self._inbox.pointer + layout.entry(self._peer, slot),
                self._notices + layout.notice(self._peer, slot),
            )
            for index, slot in enumerate(slots)
        ]
        if self._api.forward(forwards):
            self.received += len(forwards)
            # The next receive writes over the message.
            sync(self._api, _FORWARD_TIMEOUT_S)
