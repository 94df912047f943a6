"""A boss who gets mail, and a reader of the ids in it."""

import asyncio

mails: list[str] = []


def send_mail(to: str, text: str) -> None:
    mails.append(text)


async def id_in_the_mail(item: str) -> str:
    while True:
        for mail in mails:
            if item in mail:
                return mail.rsplit("/", 1)[1]
        await asyncio.sleep(0.02)
