-- What a connection did last, so that a transaction whose reply was lost can be told from one that never was.
-- oldest: 1
--
-- Each connection that changes jobs has a row and writes the number of its call into it, in the same transaction: the
-- number is there exactly if the transaction was committed. done: how many rows it changed, where that is asked.
-- writer: minutes since 1970 of the server's clock, shifted, and chance; so the rows of old connections are a range.
CREATE TABLE IF NOT EXISTS multiq_receipts (
    writer BIGINT UNSIGNED NOT NULL,
    number BIGINT UNSIGNED NOT NULL,
    done INT NOT NULL,
    PRIMARY KEY (writer)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
