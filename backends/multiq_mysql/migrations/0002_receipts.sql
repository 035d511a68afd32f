-- The receipts of the last transactions, one for each connection. After a lost reply, the connection's row shows whether its
-- last transaction was committed.
-- oldest: 1
--
-- Each connection that changes jobs has a row. The transaction of a call writes the number of the call into the row.
-- done: the number of rows that the transaction changed, if the driver needs this number.
-- writer: the connection's key. It begins with the minutes since 1970 by the server's clock, and ends with random bits. So
-- the rows of old connections are one range.
CREATE TABLE IF NOT EXISTS multiq_receipts (
    writer BIGINT UNSIGNED NOT NULL,
    number BIGINT UNSIGNED NOT NULL,
    done INT NOT NULL,
    PRIMARY KEY (writer)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
