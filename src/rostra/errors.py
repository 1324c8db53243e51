"""What a verb may end with besides success; the exit code is part of the contract."""

from __future__ import annotations


class RostraError(Exception):
    """An end that was foreseen: shown as one message, never as a traceback."""

    exit_code = 4


class RequestError(RostraError):
    """The request is wrong (config, data, arguments); the message says what to do."""

    exit_code = 2


class NoLayoutFits(RostraError):
    """No layout of the model fits the hardware."""

    exit_code = 3


class TrainingFailed(RostraError):
    """Training cannot go on, and starting it again would not help."""

    exit_code = 4


class Stopped(RostraError):
    """Stopped on request with a checkpoint saved; the same command goes on."""

    exit_code = 75
