"""The outside world of the pages: the partners of a shop, without a network."""

from dataclasses import dataclass

calls: list[str] = []


@dataclass
class Order:
    id: str
    item: str = "tea"
    amount: int = 5


@dataclass
class Receipt:
    order: str
    total: int


class Declined(Exception):
    pass


class Provider:
    """A payment provider that is down at the first request, and remembers earlier requests."""

    def __init__(self) -> None:
        self.known: dict[str, Receipt] = {}
        self.failures = 1

    def charge(self, order: Order, *, idempotency_key: str) -> Receipt:
        calls.append("charge")
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the provider is down")
        if order.amount > 1000:
            raise Declined("not enough money")
        return self.known.setdefault(idempotency_key, Receipt(order.id, order.amount))

    def find(self, idempotency_key: str) -> Receipt | None:
        return self.known.get(idempotency_key)

    def refund(self, order: str) -> None:
        calls.append(f"refund {order}")


provider = Provider()


class Warehouse:
    def __init__(self) -> None:
        self.stock = {"tea": 3, "coffee": 0}

    def reserve(self, item: str) -> str:
        calls.append(f"reserve {item}")
        return f"{item}-{self.stock.get(item, 0)}"

    def release(self, reservation: str) -> None:
        calls.append(f"release {reservation}")

    def ship(self, order: str) -> str:
        calls.append(f"ship {order}")
        return f"parcel-{order}"


warehouse = Warehouse()


async def fetch(url: str) -> str:
    return f"the text of {url}"


def send_mail(to: str, text: str) -> None:
    calls.append(f"mail to {to}: {text}")
