-- The last transaction of each connection. After a lost reply, its row shows whether the transaction was committed.
-- oldest: 1
--
-- Each connection that changes jobs has a row. The transaction of a call writes the number of the call into the row.
-- done: the number of rows that the transaction changed, where the driver needs it.
-- writer: minutes since 1970 of the server's clock, shifted, plus random bits. The rows of old connections are therefore
-- a range.
CREATE TABLE IF NOT EXISTS multiq_receipts (
    writer BIGINT UNSIGNED NOT NULL,
    number BIGINT UNSIGNED NOT NULL,
    done INT NOT NULL,
    PRIMARY KEY (writer)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
